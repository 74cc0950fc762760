/**
 * Requests over `fetch`: who asks, how long, how often again, and what an error answer means.
 *
 * A redirect is never followed, so the key never reaches another origin. What the server could not
 * take (429, 503) is asked again after a while, for as long as it says; what it may have begun is
 * not.
 */

import { textOf } from "./body.js";
import { errorOf, ExpertError, UnreachableError, UsageError } from "./errors.js";
import { Watch } from "./watch.js";

/** Where the server is and how it is asked. */
export interface ClientOptions {
  /** The address of the server; by default `http://127.0.0.1:8000`. */
  readonly baseUrl?: string | undefined;
  /** Sent as `Authorization: Bearer …`, to the origin of `baseUrl` alone. */
  readonly apiKey?: string | undefined;
  /** How long the server may be silent that is waited for, in milliseconds; by default ten minutes. */
  readonly timeoutMs?: number | undefined;
  /** How often a request is sent again that the server could not take; by default 2. */
  readonly retries?: number | undefined;
  /** Used instead of the global `fetch`. */
  readonly fetch?: typeof globalThis.fetch | undefined;
}

/** What one call has of its own. */
export interface CallOptions {
  /** Ends the call; the server stops working for it. */
  readonly signal?: AbortSignal | undefined;
  /** Instead of the client's `timeoutMs`. */
  readonly timeoutMs?: number | undefined;
}

/** A request of the API. */
export interface Call {
  readonly method: "GET" | "POST" | "DELETE";
  readonly path: string;
  readonly body?: unknown;
}

export const DEFAULT_URL = "http://127.0.0.1:8000";
const DEFAULT_TIMEOUT_MS = 600_000;
const DEFAULT_RETRIES = 2;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 60_000;
const NOT_TAKEN: ReadonlySet<number> = new Set([429, 503]);
const PRINTABLE = /^[\x21-\x7e]+$/;

/** Sends requests to one server. */
export class Transport {
  readonly #url: string;
  readonly #key: string | undefined;
  readonly #timeoutMs: number;
  readonly #retries: number;
  readonly #fetch: typeof globalThis.fetch;

  constructor(options: ClientOptions) {
    this.#url = checkedUrl(options.baseUrl ?? DEFAULT_URL);
    this.#key = checkedKey(options.apiKey);
    this.#timeoutMs = positive("timeoutMs", options.timeoutMs ?? DEFAULT_TIMEOUT_MS);
    this.#retries = whole("retries", options.retries ?? DEFAULT_RETRIES);
    // A browser's fetch wants to be called as a function of the window, not of this object.
    this.#fetch = options.fetch ?? ((input, init) => globalThis.fetch(input, init));
  }

  /** A time for one call; the caller closes it. */
  watch(options: CallOptions): Watch {
    const milliseconds = options.timeoutMs ?? this.#timeoutMs;
    return new Watch(options.signal, positive("timeoutMs", milliseconds));
  }

  /** Ask, and give the JSON object of the answer. */
  async json(call: Call, options: CallOptions): Promise<object> {
    const watch = this.watch(options);
    try {
      const response = await this.open(call, watch);
      return parsed(await readable(textOf(response, watch), watch), response);
    } finally {
      watch.close();
    }
  }

  /** Ask, and give an answer that is no error; its body is still to be read. */
  async open(call: Call, watch: Watch): Promise<Response> {
    for (let tries = 0; ; tries += 1) {
      const response = await readable(watch.during(this.#send(call, watch)), watch);
      if (response.ok) return response;
      const error = await this.#refusal(response, watch);
      const milliseconds = waitBeforeNext(tries, error.retryAfter);
      const again = NOT_TAKEN.has(response.status) && tries < this.#retries;
      if (!again || milliseconds > LONGEST_WAIT_MS) throw error;
      await watch.pause(milliseconds);
    }
  }

  #send(call: Call, watch: Watch): Promise<Response> {
    const headers: Record<string, string> = { accept: "application/json, text/event-stream" };
    if (this.#key !== undefined) headers["authorization"] = `Bearer ${this.#key}`;
    if (call.body !== undefined) headers["content-type"] = "application/json";
    return this.#fetch(this.#url + call.path, {
      method: call.method,
      headers,
      body: call.body === undefined ? null : JSON.stringify(call.body),
      redirect: "manual",
      credentials: "omit",
      cache: "no-store",
      signal: watch.signal,
    });
  }

  async #refusal(response: Response, watch: Watch): Promise<ExpertError> {
    if (response.type === "opaqueredirect" || (response.status >= 300 && response.status < 400)) {
      await response.body?.cancel();
      const place = response.headers.get("location") ?? "another address";
      return new UnreachableError(`${this.#url} sends requests on to ${place}`, {
        hint: "if that is right, give it as baseUrl; a key is not sent to where a server points",
        status: response.status,
      });
    }
    return refusalOf(response, await readable(textOf(response, watch), watch));
  }
}

/** Wait for what the network gives; what breaks there becomes an error that says so. */
async function readable<T>(promise: Promise<T>, watch: Watch): Promise<T> {
  try {
    return await promise;
  } catch (error) {
    throw failureOf(error, watch);
  }
}

/** What a call is to end with that broke: the reason of its end, or an error that says so. */
export function failureOf(error: unknown, watch: Watch): unknown {
  if (error instanceof ExpertError) return error;
  if (watch.signal.aborted) return watch.signal.reason;
  return new UnreachableError(`the connection failed: ${reasonOf(error)}`, {
    cause: error,
    hint: "is the server running at this address? it is started by: expertctl serve",
  });
}

/** How long to wait before the next try: never less than asked for, and never all at once. */
export function waitBeforeNext(tries: number, retryAfter: number | undefined): number {
  const own = FIRST_WAIT_MS * 2 ** tries;
  const least = retryAfter === undefined ? own / 2 : retryAfter * 1000;
  return least + Math.random() * (own / 2);
}

/** The seconds of a `Retry-After`, which is a number of them or a date. */
export function secondsOf(retryAfter: string | null, now: number): number | undefined {
  if (retryAfter === null) return undefined;
  if (/^\d+$/.test(retryAfter.trim())) return Number(retryAfter);
  const date = Date.parse(retryAfter);
  return Number.isNaN(date) ? undefined : Math.max(0, (date - now) / 1000);
}

function refusalOf(response: Response, text: string): ExpertError {
  const facts = {
    status: response.status,
    retryAfter: secondsOf(response.headers.get("retry-after"), Date.now()),
    requestId: response.headers.get("x-request-id") ?? undefined,
  };
  return errorOf(errorIn(text), facts);
}

function errorIn(text: string): unknown {
  try {
    const document: unknown = JSON.parse(text);
    return typeof document === "object" && document !== null && "error" in document
      ? document.error
      : undefined;
  } catch {
    return undefined; // something between here and the server answered in its own words
  }
}

function parsed(text: string, response: Response): object {
  let document: unknown;
  try {
    document = text === "" ? {} : JSON.parse(text);
  } catch (error) {
    throw new UnreachableError("the answer is not JSON", { cause: error, status: response.status });
  }
  if (typeof document === "object" && document !== null) return document;
  throw new UnreachableError("the answer is not a JSON object", { status: response.status });
}

function reasonOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return error.cause instanceof Error ? error.cause.message || error.message : error.message;
}

function checkedUrl(text: string): string {
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    throw new UsageError(`baseUrl is no address: ${text}`, { hint: `as in ${DEFAULT_URL}` });
  }
  if (url.protocol !== "http:" && url.protocol !== "https:")
    throw new UsageError(`baseUrl begins with ${url.protocol}//, not with http:// or https://`);
  if (url.username || url.password || url.search || url.hash)
    throw new UsageError("baseUrl has more than a host, a port and a path", {
      hint: "the key is given as apiKey",
    });
  return (url.origin + url.pathname).replace(/\/+$/, "");
}

/** What a header cannot hold is refused here, as `fetch` would show the key in its error. */
function checkedKey(key: string | undefined): string | undefined {
  if (key === undefined || PRINTABLE.test(key)) return key;
  throw new UsageError("apiKey is empty, or has a space or another character that no key has");
}

function positive(name: string, value: number): number {
  if (value > 0) return value;
  throw new UsageError(`${name} must be above 0`);
}

function whole(name: string, value: number): number {
  if (Number.isInteger(value) && value >= 0) return value;
  throw new UsageError(`${name} must be a whole number, 0 or more`);
}
