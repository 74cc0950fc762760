/**
 * Every error of the server as a class, in the same tree as `expertctl.errors`.
 *
 * The server answers `{"error": {"code", "message", "hint"}}`; the code chooses the class. A code
 * that is not known here is an `ExpertError` with that code. An `AbortSignal` that was given ends
 * a call with the signal's own reason, which is none of these.
 */

/** What came with an error besides its message. */
export interface ErrorFacts {
  readonly hint?: string | undefined;
  /** The status of the answer, if there was one. */
  readonly status?: number | undefined;
  /** The name that the server gave to the request, for its log. */
  readonly requestId?: string | undefined;
  /** Seconds after which the server asks to try again. */
  readonly retryAfter?: number | undefined;
  /** Of an `UnreachableError`: whether the request may have arrived; by default it may. */
  readonly sent?: boolean | undefined;
  readonly cause?: unknown;
  /** The code, where the class does not say it. */
  readonly code?: string | undefined;
}

/** Root of the tree: a message, a stable `code`, and in `hint` the way out. */
export class ExpertError extends Error {
  static readonly code: string = "error";
  readonly code: string;
  readonly hint: string;
  readonly status: number | undefined;
  readonly requestId: string | undefined;
  readonly retryAfter: number | undefined;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.name = new.target.name;
    this.code = facts.code ?? new.target.code;
    this.hint = facts.hint ?? "";
    this.status = facts.status;
    this.requestId = facts.requestId;
    this.retryAfter = facts.retryAfter;
  }
}

/** The call itself is wrong: a field, an empty prompt, a bad combination. */
export class UsageError extends ExpertError {
  static override readonly code: string = "usage";
}

/** A prompt or a conversation is longer than what the base reads. */
export class ContextLengthError extends UsageError {
  static override readonly code: string = "context_length_exceeded";
}

/** The body of a request is in a form that is not read there. */
export class MediaTypeError extends UsageError {
  static override readonly code: string = "media_type";
}

/** The request names a server that this one is not. */
export class MisdirectedError extends UsageError {
  static override readonly code: string = "misdirected";
}

/** The body of a request did not come in the time that it may take. */
export class SlowBodyError extends UsageError {
  static override readonly code: string = "slow_body";
}

/** An expert, a base or a job does not exist. */
export class NotFoundError extends ExpertError {
  static override readonly code: string = "not_found";
}

/** The server has nothing at the path of a request. */
export class UnknownAddressError extends NotFoundError {
  static override readonly code: string = "unknown_url";
}

/** An expert that another one requires is not installed. */
export class MissingDependencyError extends NotFoundError {
  static override readonly code: string = "missing_dependency";
}

/** Two things do not fit together. */
export class IncompatibleError extends ExpertError {
  static override readonly code: string = "incompatible";
}

/** An expert was made for another base. */
export class BaseMismatchError extends IncompatibleError {
  static override readonly code: string = "base_mismatch";
}

/** Two experts may not be used together. */
export class ConflictError extends IncompatibleError {
  static override readonly code: string = "conflict";
}

/** The machine of the server can neither compile nor load the kernels that a base needs. */
export class KernelsUnavailableError extends IncompatibleError {
  static override readonly code: string = "no_kernels";
}

/** Nobody who is trusted for it vouches for the bytes of an expert. */
export class TrustError extends ExpertError {
  static override readonly code: string = "trust";
}

/** A signature does not verify. */
export class SignatureError extends TrustError {
  static override readonly code: string = "signature";
}

/** Bytes differ from the digest that was promised for them. */
export class DigestError extends TrustError {
  static override readonly code: string = "digest";
}

/** A version of a package has another content than before. */
export class ChangedVersionError extends DigestError {
  static override readonly code: string = "changed";
}

/** A signature is demanded and absent. */
export class UnsignedError extends TrustError {
  static override readonly code: string = "unsigned";
}

/** The signing key was revoked. */
export class RevokedError extends TrustError {
  static override readonly code: string = "revoked";
}

/** The network or the other side failed. */
export class RegistryError extends ExpertError {
  static override readonly code: string = "registry";
}

/** No API key came, or one that is wrong, expired or revoked. */
export class UnauthenticatedError extends RegistryError {
  static override readonly code: string = "unauthenticated";
}

/** Who asks is known, and has no right to do this. */
export class ForbiddenError extends RegistryError {
  static override readonly code: string = "forbidden";
}

/** Too many requests for now; `retryAfter` seconds later they are answered again. */
export class RateLimitError extends RegistryError {
  static override readonly code: string = "rate_limit";
}

/** The network is switched off for the server. */
export class OfflineError extends RegistryError {
  static override readonly code: string = "offline";
}

/** A connection failed or broke, or whoever answers is no such server, or cannot now. */
export class UnreachableError extends RegistryError {
  static override readonly code: string = "unreachable";
  /** Whether the request may have arrived. */
  readonly sent: boolean;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts);
    this.sent = facts.sent ?? true;
  }
}

/** Nothing came within `timeoutMs` of the client; the request may have arrived. */
export class SilenceError extends UnreachableError {}

/** A limit of memory, disk or quota would be exceeded. */
export class BudgetError extends ExpertError {
  static override readonly code: string = "budget";
}

/** The disk of the server is full. */
export class DiskFullError extends BudgetError {
  static override readonly code: string = "disk_full";
}

/** One object is larger than the limit for its kind. */
export class TooLargeError extends BudgetError {
  static override readonly code: string = "too_large";
}

/** A package or an input file is malformed. */
export class InvalidPackageError extends ExpertError {
  static override readonly code: string = "invalid_package";
}

/** A device of the server failed; the server ends. */
export class DeviceError extends ExpertError {
  static override readonly code: string = "device";
}

/** The store of the server cannot be used. */
export class StoreError extends ExpertError {
  static override readonly code: string = "store";
}

/** A job ended before there was anything of its answer. */
export class NoAnswerError extends ExpertError {
  static override readonly code: string = "no_answer";
}

/** The time that was given for it was over. */
export class TimedOutError extends NoAnswerError {
  static override readonly code: string = "timeout";
}

/** Whoever asked does not want it any more. */
export class CancelledError extends NoAnswerError {
  static override readonly code: string = "cancelled";
}

const CLASSES = [
  ExpertError,
  UsageError,
  ContextLengthError,
  MediaTypeError,
  MisdirectedError,
  SlowBodyError,
  NotFoundError,
  UnknownAddressError,
  MissingDependencyError,
  IncompatibleError,
  BaseMismatchError,
  ConflictError,
  KernelsUnavailableError,
  TrustError,
  SignatureError,
  DigestError,
  ChangedVersionError,
  UnsignedError,
  RevokedError,
  RegistryError,
  UnauthenticatedError,
  ForbiddenError,
  RateLimitError,
  OfflineError,
  UnreachableError,
  BudgetError,
  DiskFullError,
  TooLargeError,
  InvalidPackageError,
  DeviceError,
  StoreError,
  NoAnswerError,
  TimedOutError,
  CancelledError,
];

/** Code → class. */
export const ERROR_CLASSES: ReadonlyMap<string, typeof ExpertError> = new Map(
  CLASSES.map((one) => [one.code, one]),
);

/** Status → the class of an answer, whatever its code: later the same request may succeed. */
const FOR_NOW: ReadonlyMap<number | undefined, typeof ExpertError> = new Map([
  [429, RateLimitError],
  [502, UnreachableError],
  [503, UnreachableError],
]);

/** Status → the class of an answer whose code says nothing, as that of a proxy. */
const BY_STATUS: ReadonlyMap<number | undefined, typeof ExpertError> = new Map([
  [400, UsageError],
  [401, UnauthenticatedError],
  [403, ForbiddenError],
  [404, NotFoundError],
  [405, UsageError],
  [408, TimedOutError],
  [413, TooLargeError],
  [415, MediaTypeError],
  [422, IncompatibleError],
  [504, TimedOutError],
  [507, BudgetError],
]);

/** More characters of a text than this are not shown. */
const MAX_TEXT = 1000;

/** Make the error that a document `{"code", "message", "hint"}` stands for. */
export function errorOf(document: unknown, facts: ErrorFacts): ExpertError {
  const { status } = facts;
  const code = told(document, "code");
  const message = told(document, "message") || untold(status);
  const ByCode = ERROR_CLASSES.get(code ?? "");
  const Kind = FOR_NOW.get(status) ?? ByCode ?? BY_STATUS.get(status) ?? RegistryError;
  return new Kind(message, { ...facts, code, hint: told(document, "hint"), sent: status !== 503 });
}

/** Controls, halves of characters, bidi controls and white space; joiners of emoji and letters stay. */
const UNSAFE = /[\p{Cc}\p{Cs}\p{Z}\u202A-\u202E\u2066-\u2069]+/gu;

/** A text of a server as it may be printed: bounded, one line, nothing that a terminal obeys. */
export function shown(text: string): string {
  const clean = text.slice(0, MAX_TEXT).replace(UNSAFE, " ").trim();
  return text.length > MAX_TEXT ? `${clean}…` : clean;
}

function untold(status: number | undefined): string {
  if (status === undefined) return "the answer broke off";
  return `the server answered with status ${status}`;
}

function told(document: unknown, name: string): string | undefined {
  if (typeof document !== "object" || document === null) return undefined;
  const value: unknown = Reflect.get(document, name);
  return typeof value === "string" ? shown(value) : undefined;
}
