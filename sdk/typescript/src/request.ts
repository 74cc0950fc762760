/** What a prompt is asked with. Limits and defaults are the server's; see its OpenAPI document. */

import type { Plan } from "./result.js";

/** What JSON can hold. */
export type JsonValue =
  | null
  | boolean
  | number
  | string
  | readonly JsonValue[]
  | { readonly [key: string]: JsonValue };

/** What JSON calls an object; the keys are its author's and are never renamed. */
export interface JsonObject {
  readonly [key: string]: JsonValue;
}

/** A JSON Schema with a name, as the OpenAI API has it. */
export interface NamedSchema {
  readonly name: string;
  readonly schema?: JsonObject | undefined;
  readonly description?: string | undefined;
  readonly strict?: boolean | undefined;
}

/** The form that the answer is checked for. */
export interface ResponseFormat {
  readonly type: "text" | "json" | "json_object" | "json_schema" | "python" | "sql" | "custom";
  /** Of `json_schema`. */
  readonly schema?: JsonObject | undefined;
  /** Of `json_schema`, instead of `schema`. */
  readonly jsonSchema?: NamedSchema | undefined;
  /** Of `custom`: a validator that whoever runs the server named. */
  readonly name?: string | undefined;
}

/** How the next token is drawn; what is left out is the experts' or the task's choice. */
export interface SamplingWishes {
  readonly temperature?: number | undefined;
  readonly maxTokens?: number | undefined;
  readonly topP?: number | undefined;
  readonly topK?: number | undefined;
  readonly minP?: number | undefined;
  readonly repetitionPenalty?: number | undefined;
  readonly stop?: string | readonly string[] | undefined;
  readonly seed?: number | undefined;
}

/** Which experts answer; what is left out is the router's choice. */
export interface RoutingWishes {
  /** `namespace/name[@constraint][:weight]`, in order. */
  readonly forceExperts?: readonly string[] | undefined;
  readonly excludeExperts?: readonly string[] | undefined;
  readonly maxExperts?: number | undefined;
  /** Whether the base answers alone. */
  readonly noExperts?: boolean | undefined;
}

/** A message of an earlier turn; the system's comes first. */
export interface EarlierMessage {
  readonly role: "system" | "user" | "assistant";
  readonly content: string;
}

/** A prompt, and what its plan depends on. */
export interface RouteRequest extends SamplingWishes, RoutingWishes {
  readonly prompt: string;
}

/** A prompt, and all that can be said about how it is answered. */
export interface InferRequest extends RouteRequest {
  /** A text with `{prompt}` and `{body}` in it. */
  readonly template?: string | undefined;
  /** A document that the prompt is about. */
  readonly body?: string | undefined;
  /** What precedes the prompt: complete turns, and the plan of the last answer. */
  readonly conversation?: { readonly messages: readonly EarlierMessage[]; readonly plan?: Plan } | undefined;
  /** Whether the oldest turns, then the end, of a prompt that is too long are cut off. */
  readonly truncate?: boolean | undefined;
  /** The base that must answer, or `auto` for the one that `run` would choose there. */
  readonly base?: string | undefined;
  /** How many tokens the prompt and the answer may have together. */
  readonly contextSize?: number | undefined;
  readonly responseFormat?: ResponseFormat | undefined;
  readonly userId?: string | undefined;
  readonly sessionId?: string | undefined;
  /** What was computed for a text is kept for the next one of the same key. */
  readonly cacheKey?: string | undefined;
  /** Yours; its keys are sent as they are. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
  /** 0 to 9; 9 is served first. */
  readonly priority?: number | undefined;
  /** Milliseconds after which the answer ends with what is there, `finishReason` "timeout". */
  readonly timeoutMs?: number | undefined;
}
