/** Routed experts of a base: what a server counts of them, and which stay in memory. */

import type { JsonObject } from "./request.js";

/** All, only what an exchange of experts needs, or nothing. */
export type MoeMode = "full" | "update" | "off";

/** How many routed experts a base has, and how many of them are in memory at most. */
export interface MoeResidence {
  readonly miss: "exact" | "skip";
  readonly layers: number;
  /** Of each layer. */
  readonly experts: number;
  /** Of each layer: how many are kept. */
  readonly slots: number;
  /** Of all layers, at most. */
  readonly inMemory: number;
  /** How the others come from the disk. */
  readonly cold: "read" | "map" | "direct";
}

/** What a profile says of which experts stay. */
export interface MoeGuide {
  /** The share of all residents that an update may exchange for others of it. */
  readonly exchange: number;
  /** The experts that keep their slots, by the number of the layer. */
  readonly pinned: Readonly<Record<string, readonly number[]>>;
}

/** An expert, and how often it was asked for. */
export type MoeCount = readonly [expert: number, count: number];

/** What one layer was asked for; hot is what was in memory. Times are microseconds of a call. */
export interface MoeLayer {
  readonly layer: number;
  readonly calls: number;
  readonly hotSlotsTotal: number;
  readonly coldSlotsTotal: number;
  readonly hotSlotRatio: number;
  /** Experts that calls asked for, each once for a call. */
  readonly requests: number;
  readonly missedRequests: number;
  /** Missed requests by requests. */
  readonly fallbackRate: number;
  readonly swaps: number;
  /** Computing. */
  readonly parallelHotLaneWallTimePerCallUs: number;
  /** Waiting for experts that were not there. */
  readonly parallelColdLaneWallTimePerCallUs: number;
  readonly experts: readonly MoeCount[];
  readonly hotExperts: readonly MoeCount[];
  readonly coldExperts: readonly MoeCount[];
}

/** What a server counted; a profile, too. Where nothing is counted it has a mode and no layers. */
export interface MoeActivity {
  readonly enabled: boolean;
  readonly mode: MoeMode;
  readonly schema: string;
  readonly layers: readonly MoeLayer[];
  readonly nExpert?: number;
  readonly nExpertUsed?: number;
  readonly updates?: number;
  readonly overflowResets?: number;
  readonly base?: string;
  readonly residence?: MoeResidence;
  /** Only where an expert could be missing. */
  readonly guide?: MoeGuide;
}

/** What is counted from now on, and which profile says which stay. */
export interface MoeChange {
  /** Another mode begins to count again. */
  readonly mode?: MoeMode | undefined;
  /** Whether to begin again in any case. */
  readonly reset?: boolean | undefined;
  /** A profile, as a file has it or as `moe()` gives it; or the name of the base, for what was learnt of it. */
  readonly profile?: string | JsonObject | MoeActivity | undefined;
  /** So many experts of each layer stay; or, as `"50%"`, those that half of all tokens ask for. */
  readonly pin?: number | string | undefined;
  /** The share of residents that an update may exchange for others of the profile. */
  readonly exchange?: number | undefined;
}
