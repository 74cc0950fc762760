/** What the server answers. */

/** One expert of a plan and why it is there. */
export interface PlannedExpert {
  readonly ref: string;
  readonly contentDigest: string;
  readonly packageDigest: string;
  readonly kind: string;
  readonly score: number;
  readonly weight: number;
  readonly reason: string;
}

/** How tokens were drawn. */
export interface SamplingParams {
  readonly temperature: number;
  readonly topP: number;
  readonly topK: number;
  readonly minP: number;
  readonly repetitionPenalty: number;
  readonly presencePenalty: number;
  readonly frequencyPenalty: number;
  readonly maxTokens: number;
  readonly stop: readonly string[];
}

/** Experts in order on one base; none means that the base answers alone. */
export interface Plan {
  readonly identity: string;
  readonly seed: number;
  readonly base: string;
  readonly experts: readonly PlannedExpert[];
  readonly params: SamplingParams;
}

/** An expert of the plan that did not fit into memory. */
export interface DroppedExpert {
  readonly ref: string;
  readonly contentDigest: string;
  readonly reason: string;
}

/** Milliseconds by what they were spent on; `ttft` is until the first token. */
export interface Timings {
  readonly route: number;
  readonly queue?: number;
  readonly load: number;
  readonly prefill: number;
  readonly ttft: number;
  readonly decode: number;
  readonly post?: number;
  readonly total: number;
}

/** Bytes by purpose, beside the limit and the most that was held. */
export interface MemoryUse {
  readonly budget: number;
  readonly peak: number;
  readonly base: number;
  readonly experts: number;
  readonly kv: number;
  readonly buffers: number;
}

/** What became of the routed experts of a base, of all that was answered in the same time. */
export interface MoeUse {
  /** What happened to an expert that was not in memory: it was read, or left out. */
  readonly miss: "exact" | "skip";
  /** How it came from the disk. */
  readonly cold: "read" | "map" | "direct";
  readonly layers: number;
  /** Of each layer. */
  readonly experts: number;
  /** Of each layer: how many are kept. */
  readonly slots: number;
  /** Of all layers, at most. */
  readonly inMemory: number;
  /** Experts that were asked for, each once for a pass and layer. */
  readonly requests: number;
  /** Those of them that were not in memory then. */
  readonly misses: number;
  readonly fallbackRate: number;
  /** The share of the routers' weights that was left out. */
  readonly skippedMass: number;
  readonly loads: number;
  readonly readAhead: number;
  readonly bytesRead: number;
  readonly waitedMs: number;
  readonly swaps: number;
  readonly lent: number;
}

/** Why an answer ended; "timeout" and "cancelled" leave what was there by then. */
export type FinishReason = "stop" | "length" | "timeout" | "cancelled";

/** One answer. */
export interface InferResult {
  readonly jobId: string;
  readonly submittedAt: string;
  readonly text: string;
  readonly tokensGenerated: number;
  readonly expertsUsed: readonly string[];
  readonly latencyMs: number;
  readonly finishReason: FinishReason;
  /** The stop string that ended it. */
  readonly stoppedBy: string | null;
  /** Milliseconds of each stage; waiting for a turn is none. */
  readonly stages: {
    readonly reception: number;
    readonly reasoning: number;
    readonly preparation: number;
    readonly inference: number;
    readonly postProcessing: number;
  };
  /** Whether the answer has the form that was called for; null where none was. */
  readonly validationPassed: boolean | null;
  readonly plan: Plan;
  readonly dropped: readonly DroppedExpert[];
  readonly tokens: {
    readonly prompt: number;
    readonly generated: number;
    readonly ids: readonly number[];
  };
  readonly timingsMs: Timings;
  readonly prefillTokensPerS: number;
  readonly decodeTokensPerS: number;
  readonly memory: MemoryUse;
  readonly cache: {
    readonly expertsHit: number;
    readonly expertsLoaded: number;
    readonly kvReusedTokens: number;
  };
  /** Only of a base that has routed experts. */
  readonly moe?: MoeUse;
  readonly numerics: {
    readonly backend: string;
    readonly dtype: string;
    readonly adapterDtype: string;
    readonly deterministic: boolean;
    /** What the base loses by int8 or int4, in nats; only with these, where it is measured. */
    readonly klDivergence?: number;
  };
  readonly bytesRead: { readonly ssd: number; readonly ram: number };
  readonly threads: number;
  readonly seed: number;
  readonly notes: readonly string[];
  readonly warnings: readonly string[];
}

/** A model of `models()`: a base, an expert, or `auto`. */
export interface Model {
  readonly id: string;
  readonly object: "model";
  readonly created: number;
  readonly ownedBy: string;
}

/** What is known of an answer before its first token. */
export interface Started {
  readonly jobId: string;
  readonly submittedAt: string;
  readonly plan: Plan;
  readonly tokens: {
    readonly prompt: number;
    /** Of these, how many an earlier text of the same key and plan had read. */
    readonly reused: number;
  };
}

/** Where a job is; one that is "cancelled" is at its end once it has an `endedAt`. */
export type JobStatus = "queued" | "processing" | "finished" | "failed" | "cancelled";

/** A job as it is now. */
export interface Job {
  readonly jobId: string;
  readonly status: JobStatus;
  readonly submittedAt: string;
  readonly startedAt: string | null;
  /** When it came to its end; from then on it changes no more. */
  readonly endedAt: string | null;
  /** About how long until it begins; null once it has. */
  readonly estimatedWaitMs: number | null;
  /** As much of the answer as is certain. */
  readonly text: string;
  readonly result: InferResult | null;
  readonly error: { readonly code: string; readonly message: string; readonly hint: string } | null;
}

/** Which experts would answer, and which others were considered. */
export interface RouteResult {
  readonly plan: Plan;
  readonly candidates: readonly Candidate[];
  readonly encoder: string;
  readonly threshold: number;
  readonly prompt: PromptFeatures;
  readonly notes: readonly string[];
  readonly warnings: readonly string[];
  readonly timingsMs: Readonly<Record<string, number>>;
}

/** What a prompt looks like to the router. */
export interface PromptFeatures {
  readonly characters: number;
  readonly language: string | null;
  readonly hasJson: boolean;
  readonly hasCode: boolean;
  readonly task: string;
  readonly format: string | null;
}

/** An expert that the router looked at. */
export interface Candidate {
  readonly ref: string;
  readonly contentDigest: string;
  readonly chosen: boolean;
  readonly score: number;
  readonly reason: string;
  readonly features: {
    readonly cosine: number | null;
    readonly share: number | null;
    readonly support: number | null;
    readonly keywords: readonly string[];
    readonly hint: string | null;
    readonly success: number;
    readonly vramMb: number;
    readonly priority: number;
  };
  readonly flags: readonly Flag[];
}

/** What speaks against an expert, as the index has it. */
export interface Flag {
  readonly code: string;
  readonly sentence: string;
  readonly other: string | null;
}

/** One version of an installed expert, and what it is to this server. */
export interface Expert {
  readonly ref: string;
  readonly name: string;
  readonly version: string;
  readonly description: string;
  readonly license: string;
  readonly kind: string;
  readonly contentDigest: string;
  readonly packageDigest: string;
  readonly base: string;
  /** Bytes of all its files. */
  readonly size: number;
  /** Whether it was made for the base that is served. */
  readonly fits: boolean;
  /** Whether the key that signed it is believed no longer. */
  readonly revoked: boolean;
  readonly inMemory: boolean;
}
