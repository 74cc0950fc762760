/** Jobs: requests that go on by themselves, and are asked about. */

import { CancelledError, errorOf, NoAnswerError, UsageError } from "./errors.js";
import { fromWire } from "./names.js";
import type { InferRequest } from "./request.js";
import type { InferResult, Job } from "./result.js";
import { type CallOptions, positive, type Transport } from "./transport.js";

const PATH = "/v1/jobs";
const FIRST_LOOK_MS = 50;
const SLOWEST_LOOK_MS = 2000;

/** How long `wait` waits. */
export interface WaitOptions extends CallOptions {
  /** The longest time between two looks, in milliseconds; by default 2000. */
  readonly pollMs?: number | undefined;
}

/** The answer of a job, what was there of it if it was cancelled; throws where there is none. */
export function demandResult(job: Job): InferResult {
  if (job.result !== null) return job.result;
  if (job.error !== null) throw errorOf(job.error, {});
  if (job.status === "cancelled") throw new CancelledError(`the job ${job.jobId} was cancelled`);
  throw new NoAnswerError(`the job ${job.jobId} is ${job.status}`, { hint: "wait for its end" });
}

/** The jobs of whoever has this key. */
export class Jobs {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Put a request into the queue; it goes on whether or not anybody asks. */
  async submit(request: InferRequest, options: CallOptions = {}): Promise<Job> {
    const call = { method: "POST", path: PATH, body: request } as const;
    return fromWire<Job>(await this.#transport.json(call, options));
  }

  /** Look at a job. */
  async get(jobId: string, options: CallOptions = {}): Promise<Job> {
    const call = { method: "GET", path: pathOf(jobId) } as const;
    return fromWire<Job>(await this.#transport.json(call, options));
  }

  /**
   * Look at a job until it is at its end; `timeoutMs` bounds each look, a signal the whole.
   *
   * One that is called off is not at its end yet: it has what is there of the answer once it is.
   */
  async wait(jobId: string, options: WaitOptions = {}): Promise<Job> {
    const longest = positive("pollMs", options.pollMs ?? SLOWEST_LOOK_MS);
    for (let pause = FIRST_LOOK_MS; ; pause = Math.min(2 * pause, longest)) {
      const job = await this.get(jobId, options);
      if (job.endedAt !== null) return job;
      await this.#pause(pause, options);
    }
  }

  /** End a job where it is; one that is at its end stays as it is. */
  async cancel(jobId: string, options: CallOptions = {}): Promise<Job> {
    const call = { method: "DELETE", path: pathOf(jobId) } as const;
    return fromWire<Job>(await this.#transport.json(call, options));
  }

  async #pause(milliseconds: number, options: CallOptions): Promise<void> {
    const watch = this.#transport.watch(options);
    try {
      await watch.pause(milliseconds);
    } finally {
      watch.close();
    }
  }
}

/** An address takes "." and ".." for folders, however they are written. */
function pathOf(jobId: string): string {
  if (["", ".", ".."].includes(jobId)) throw new UsageError(`no job has the id "${jobId}"`);
  return `${PATH}/${encodeURIComponent(jobId)}`;
}
