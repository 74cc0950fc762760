/** `ExpertClient`: the native API of a generation server. */

import { Jobs } from "./jobs.js";
import type { MoeActivity, MoeChange } from "./moe.js";
import { fromWire } from "./names.js";
import type { InferRequest, RouteRequest } from "./request.js";
import type { Expert, InferResult, Model, RouteResult } from "./result.js";
import { InferStream } from "./stream.js";
import { type CallOptions, type ClientOptions, Transport } from "./transport.js";

/** A client of one server; it holds no connection, so it need not be closed. */
export class ExpertClient {
  /** Requests that go on by themselves. */
  readonly jobs: Jobs;
  readonly #transport: Transport;

  constructor(options: ClientOptions = {}) {
    this.#transport = new Transport(options);
    this.jobs = new Jobs(this.#transport);
  }

  /** Answer a prompt. */
  async infer(request: InferRequest, options: CallOptions = {}): Promise<InferResult> {
    return fromWire<InferResult>(await this.#post("/v1/infer", request, options));
  }

  /** Answer a prompt, piece by piece. */
  inferStream(request: InferRequest, options: CallOptions = {}): InferStream {
    const body = { ...request, stream: true };
    return new InferStream(this.#transport, { method: "POST", path: "/v1/infer", body }, options);
  }

  /** Say which experts would answer a prompt, and why; nothing is loaded. */
  async route(request: RouteRequest, options: CallOptions = {}): Promise<RouteResult> {
    return fromWire<RouteResult>(await this.#post("/v1/route", request, options));
  }

  /** List the experts that are installed, by name and version. */
  async experts(options: CallOptions = {}): Promise<readonly Expert[]> {
    const answer = await this.#get("/v1/experts", options);
    return fromWire<{ experts: readonly Expert[] }>(answer).experts;
  }

  /** List what the `model` of the OpenAI and Anthropic APIs can be here. */
  async models(options: CallOptions = {}): Promise<readonly Model[]> {
    const answer = await this.#get("/v1/models", options);
    return fromWire<{ data: readonly Model[] }>(answer).data;
  }

  /** Tell what was counted of the routed experts of the base; nothing changes by it. */
  async moe(options: CallOptions = {}): Promise<MoeActivity> {
    return fromWire<MoeActivity>(await this.#get("/moe", options));
  }

  /** Count routed experts otherwise, or let a profile say which stay; tell what holds then. */
  async changeMoe(change: MoeChange, options: CallOptions = {}): Promise<MoeActivity> {
    return fromWire<MoeActivity>(await this.#post("/moe", change, options));
  }

  #get(path: string, options: CallOptions): Promise<object> {
    return this.#transport.json({ method: "GET", path }, options);
  }

  #post(path: string, body: object, options: CallOptions): Promise<object> {
    return this.#transport.json({ method: "POST", path, body }, options);
  }
}
