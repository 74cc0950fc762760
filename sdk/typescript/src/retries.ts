/**
 * When a request is sent again, by the rules of the Python client: what the server refused for
 * now, or never got, after growing, random waits; what it may have begun only if that does no harm.
 */

import { RateLimitError, UnreachableError } from "./errors.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
/** A server that asks for a longer wait is not waited for. */
const LONGEST_ASKED_SECONDS = 60;

/** How long to wait after the first, second … try; undefined where another one is of no use. */
export function waitAfter(tries: number, error: unknown, isRepeatable: boolean): number | undefined {
  const asked = secondsAsked(error, isRepeatable);
  if (asked === undefined || asked > LONGEST_ASKED_SECONDS) return undefined;
  const own = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (tries - 1));
  return Math.max(asked * 1000, own / 2) + Math.random() * (own / 2); // never all at once
}

function secondsAsked(error: unknown, isRepeatable: boolean): number | undefined {
  if (error instanceof RateLimitError) return error.retryAfter ?? 0;
  if (error instanceof UnreachableError && (isRepeatable || !error.sent)) return error.retryAfter ?? 0;
  return undefined;
}

/** The seconds of a `Retry-After`; a date, which needs a right clock, counts as none. */
export function secondsOf(retryAfter: string | null): number | undefined {
  const text = retryAfter?.trim() ?? "";
  return /^\d{1,9}$/.test(text) ? Number(text) : undefined;
}
