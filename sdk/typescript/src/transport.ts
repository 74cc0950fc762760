/**
 * Requests over `fetch`: who asks, how long, and what an error answer means.
 *
 * A redirect is never followed, so the key never reaches another origin; that of the environment
 * is for the server of the environment alone.
 */

import { textOf } from "./body.js";
import { variable } from "./environment.js";
import { errorOf, ExpertError, RegistryError, shown, UnreachableError, UsageError } from "./errors.js";
import { toWire } from "./names.js";
import { secondsOf, waitAfter } from "./retries.js";
import { Watch } from "./watch.js";

/** Where the server is and how it is asked. */
export interface ClientOptions {
  /** The address of the server; by default that of `EXPERT_SERVER`, else `http://127.0.0.1:8000`. */
  readonly baseUrl?: string | undefined;
  /** Sent as `Authorization: Bearer …`, to that server alone; by default that of `EXPERT_API_KEY`. */
  readonly apiKey?: string | undefined;
  /** How long the server may be silent that is waited for, in milliseconds; by default ten minutes. */
  readonly timeoutMs?: number | undefined;
  /** How often a request is sent again that was not taken, or does no harm twice; by default 2. */
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
  /** With names of ours. */
  readonly body?: object;
}

export const DEFAULT_URL = "http://127.0.0.1:8000";
const DEFAULT_TIMEOUT_MS = 600_000;
const DEFAULT_RETRIES = 2;
/** What `fetch` of Node says where no connection came about; browsers do not tell. */
const NEVER_SENT: ReadonlySet<unknown> = new Set([
  "ECONNREFUSED",
  "ENOTFOUND",
  "EAI_AGAIN",
  "UND_ERR_CONNECT_TIMEOUT",
]);
const PRINTABLE = /^[\x21-\x7e]+$/;

/** Sends requests to one server. */
export class Transport {
  readonly #url: string;
  readonly #key: string | undefined;
  readonly #timeoutMs: number;
  readonly #retries: number;
  readonly #fetch: typeof globalThis.fetch;

  constructor(options: ClientOptions) {
    const named = checkedUrl(variable("EXPERT_SERVER") ?? DEFAULT_URL);
    this.#url = options.baseUrl === undefined ? named : checkedUrl(options.baseUrl);
    const isNamed = new URL(this.#url).origin === new URL(named).origin;
    this.#key = checkedKey(options.apiKey ?? (isNamed ? variable("EXPERT_API_KEY") : undefined));
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
      return await this.#again(call, watch, async () => {
        const response = await this.#answer(call, watch);
        return parsed(await readable(textOf(response, watch), watch), response);
      });
    } finally {
      watch.close();
    }
  }

  /** Ask, and give an answer that is no error; its body is still to be read. */
  open(call: Call, watch: Watch): Promise<Response> {
    return this.#again(call, watch, () => this.#answer(call, watch));
  }

  async #again<T>(call: Call, watch: Watch, attempt: () => Promise<T>): Promise<T> {
    for (let tries = 1; ; tries += 1) {
      try {
        return await attempt();
      } catch (error) {
        const wait = waitAfter(tries, error, call.method !== "POST");
        if (wait === undefined || tries > this.#retries) throw error;
        watch.renew();
        await watch.pause(wait);
      }
    }
  }

  async #answer(call: Call, watch: Watch): Promise<Response> {
    const body = call.body === undefined ? null : written(call.body);
    const response = await readable(watch.during(this.#send(call, body, watch.signal)), watch);
    if (response.ok) return response;
    throw await this.#refusal(response, watch);
  }

  #send(call: Call, body: string | null, signal: AbortSignal): Promise<Response> {
    const headers: Record<string, string> = { accept: "application/json, text/event-stream" };
    if (this.#key !== undefined) headers["authorization"] = `Bearer ${this.#key}`;
    if (body !== null) headers["content-type"] = "application/json";
    return this.#fetch(this.#url + call.path, {
      method: call.method,
      headers,
      body,
      redirect: "manual",
      credentials: "omit",
      cache: "no-store",
      signal,
    });
  }

  async #refusal(response: Response, watch: Watch): Promise<ExpertError> {
    if (response.type === "opaqueredirect" || (response.status >= 300 && response.status < 400)) {
      await response.body?.cancel();
      const place = shown(response.headers.get("location") ?? "") || "another address";
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
  return new UnreachableError(`the connection failed: ${shown(reasonOf(error))}`, {
    cause: error,
    sent: !NEVER_SENT.has(codeOf(error)),
    hint: "is the server running at this address? it is started by: expertctl serve",
  });
}

function refusalOf(response: Response, text: string): ExpertError {
  const facts = {
    status: response.status,
    retryAfter: secondsOf(response.headers.get("retry-after")),
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
    throw misunderstood("not JSON", response, error);
  }
  if (typeof document === "object" && document !== null) return document;
  throw misunderstood("not a JSON object", response);
}

function misunderstood(what: string, { status }: Response, cause?: unknown): RegistryError {
  const hint = "is that an expertctl server, and of this version?";
  return new RegistryError(`the answer is ${what}`, { cause, status, hint });
}

function written(body: object): string {
  try {
    return JSON.stringify(toWire(body));
  } catch (error) {
    throw new UsageError(`the request is no JSON: ${reasonOf(error)}`, { cause: error });
  }
}

function reasonOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return error.cause instanceof Error ? error.cause.message || error.message : error.message;
}

function codeOf(error: unknown): unknown {
  if (!(error instanceof Error) || !(error.cause instanceof Error)) return undefined;
  return Reflect.get(error.cause, "code");
}

function checkedUrl(text: string): string {
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    throw new UsageError(`${shown(text)} is no address of a server`, { hint: `as in ${DEFAULT_URL}` });
  }
  if (url.protocol !== "http:" && url.protocol !== "https:")
    throw new UsageError(`the address begins with ${url.protocol}//, not with http:// or https://`);
  if (url.username || url.password || url.search || url.hash)
    throw new UsageError("the address has more than a host, a port and a path", {
      hint: "the key is given as apiKey",
    });
  return (url.origin + url.pathname).replace(/\/+$/, "");
}

/** What a header cannot hold is refused here, as `fetch` would show the key in its error. */
function checkedKey(key: string | undefined): string | undefined {
  if (key === undefined || PRINTABLE.test(key)) return key;
  throw new UsageError("the API key is empty, or has a space or another character that no key has");
}

/** Demand a number above 0. */
export function positive(name: string, value: number): number {
  if (value > 0) return value;
  throw new UsageError(`${name} must be above 0`);
}

function whole(name: string, value: number): number {
  if (Number.isInteger(value) && value >= 0) return value;
  throw new UsageError(`${name} must be a whole number, 0 or more`);
}
