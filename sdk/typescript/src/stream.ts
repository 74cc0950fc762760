/**
 * An answer as it is written.
 *
 * The request is sent when the first chunk is asked for. Whoever leaves the loop, or aborts by a
 * signal, ends the connection, and the server stops writing.
 */

import { piecesOf } from "./body.js";
import { type ErrorFacts, errorOf, NoAnswerError, RegistryError, shown, UnreachableError } from "./errors.js";
import { eventsOf, type ServerEvent } from "./events.js";
import { fromWire } from "./names.js";
import type { InferResult, Started } from "./result.js";
import { type Call, type CallOptions, failureOf, type Transport } from "./transport.js";
import type { Watch } from "./watch.js";

/** A piece of an answer, or what stands before it and after it. */
export interface Chunk {
  /** Text that has become certain; empty in the chunks that bring `started` or `result`. */
  readonly text: string;
  /** With the first chunk: who answers, and what was read. */
  readonly started?: Started;
  /** With the last chunk: the whole answer. */
  readonly result?: InferResult;
}

/** The chunks of one answer; it can be read once. */
export class InferStream implements AsyncIterableIterator<Chunk, undefined> {
  readonly #chunks: AsyncGenerator<Chunk, undefined>;
  /** Since it is read. */
  #watch: Watch | undefined;
  #result: InferResult | undefined;

  constructor(transport: Transport, call: Call, options: CallOptions) {
    this.#chunks = this.#read(transport, call, options);
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  next(): Promise<IteratorResult<Chunk, undefined>> {
    return this.#chunks.next();
  }

  /** End the connection; a loop that is left does so by itself. */
  return(): Promise<IteratorResult<Chunk, undefined>> {
    this.#watch?.close();
    return this.#chunks.return(undefined);
  }

  /** Read what is left of it and give the whole answer; throws where it was left before its end. */
  async result(): Promise<InferResult> {
    for await (const _ of this);
    if (this.#result !== undefined) return this.#result;
    throw new NoAnswerError("the answer is not whole", { hint: "read the stream to its end" });
  }

  async *#read(
    transport: Transport,
    call: Call,
    options: CallOptions,
  ): AsyncGenerator<Chunk, undefined> {
    const watch = (this.#watch = transport.watch(options));
    try {
      const response = await transport.open(call, watch);
      const requestId = response.headers.get("x-request-id") ?? undefined;
      for await (const event of eventsOf(piecesOf(bodyOf(response), watch))) {
        const chunk = chunkOf(event, { requestId });
        if (chunk === undefined) continue;
        this.#result = chunk.result;
        yield chunk;
        if (chunk.result !== undefined) return undefined;
      }
      throw new UnreachableError("the stream ended before the answer did");
    } catch (error) {
      throw failureOf(error, watch);
    } finally {
      watch.close();
    }
  }
}

function bodyOf(response: Response): ReadableStream<Uint8Array> {
  const kind = response.headers.get("content-type") ?? "";
  if (kind.startsWith("text/event-stream") && response.body !== null) return response.body;
  throw new UnreachableError(`the answer is no stream of events but ${shown(kind) || "nothing"}`);
}

/** What an event brings; events of a later server that are not known here bring nothing. */
function chunkOf(event: ServerEvent, facts: ErrorFacts): Chunk | undefined {
  switch (event.name) {
    case "started":
      return { text: "", started: fromWire<Started>(documentOf(event)) };
    case "piece":
      return { text: fromWire<{ text: string }>(documentOf(event)).text };
    case "finished":
      return { text: "", result: fromWire<InferResult>(documentOf(event)) };
    case "failed":
    case "error":
      throw errorOf(fromWire<{ error: unknown }>(documentOf(event)).error, facts);
    default:
      return undefined;
  }
}

function documentOf(event: ServerEvent): object {
  let document: unknown;
  try {
    document = JSON.parse(event.data);
  } catch (error) {
    throw new RegistryError(`the event ${event.name} is not JSON`, { cause: error });
  }
  if (typeof document === "object" && document !== null) return document;
  throw new RegistryError(`the event ${event.name} is no object`);
}
