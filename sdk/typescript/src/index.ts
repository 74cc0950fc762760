/** The client of the expertctl generation server. */

export { ExpertClient } from "./client.js";
export * from "./errors.js";
export { demandResult } from "./jobs.js";
export type { Jobs, WaitOptions } from "./jobs.js";
export type * from "./moe.js";
export type * from "./request.js";
export type * from "./result.js";
export type { Chunk, InferStream } from "./stream.js";
export type { CallOptions, ClientOptions } from "./transport.js";
