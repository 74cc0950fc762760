/** What ends a call before its answer: the caller's own signal, or too long a silence. */

import { SilenceError } from "./errors.js";

/** A timer for longer than this would go off at once; so long is as good as without end. */
const LONGEST_TIMER = 2 ** 31 - 1;

/**
 * One call's time. Whoever makes one ends it with `close`.
 *
 * Time runs only while something is awaited from the server: neither while the caller is at work
 * on what came, nor in a pause before the next try.
 */
export class Watch {
  #controller = new AbortController();
  readonly #given: AbortSignal | undefined;
  readonly #milliseconds: number;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #isSilent = false;

  constructor(given: AbortSignal | undefined, milliseconds: number) {
    this.#given = given;
    this.#milliseconds = milliseconds;
    if (given?.aborted) this.#leave();
    given?.addEventListener("abort", this.#leave);
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /**
   * Wait for what the server sends next; where that takes too long, the try ends, even if whoever
   * fetches looks at no signal.
   */
  async during<T>(promise: Promise<T>): Promise<T> {
    this.#start();
    const { signal } = this;
    let ended = (): void => undefined;
    const end = new Promise<never>((_, reject) => {
      ended = () => reject(signal.reason);
      if (signal.aborted) ended();
      else signal.addEventListener("abort", ended, { once: true });
    });
    try {
      return await Promise.race([promise, end]);
    } finally {
      clearTimeout(this.#timer);
      signal.removeEventListener("abort", ended);
    }
  }

  /** Go on after a silence, which ended one try: the next one has a signal of its own. */
  renew(): void {
    if (!this.#isSilent) return;
    this.#isSilent = false;
    this.#controller = new AbortController();
    if (this.#given?.aborted) this.#leave();
  }

  /** End the call, if it still goes on, and the timer. */
  close(): void {
    clearTimeout(this.#timer);
    this.#given?.removeEventListener("abort", this.#leave);
    this.#controller.abort();
  }

  /** Wait, unless the call ends first. */
  pause(milliseconds: number): Promise<void> {
    return new Promise((resolve, reject) => {
      const ended = (): void => {
        clearTimeout(timer);
        reject(this.signal.reason);
      };
      const timer = setTimeout(() => {
        this.signal.removeEventListener("abort", ended);
        resolve();
      }, milliseconds);
      if (this.signal.aborted) ended();
      else this.signal.addEventListener("abort", ended, { once: true });
    });
  }

  #start(): void {
    clearTimeout(this.#timer);
    if (this.#milliseconds > LONGEST_TIMER) return;
    this.#timer = setTimeout(this.#despair, this.#milliseconds);
  }

  readonly #leave = (): void => this.#controller.abort(this.#given?.reason);

  readonly #despair = (): void => {
    this.#isSilent = !this.signal.aborted;
    const error = new SilenceError(`nothing came from the server for ${this.#milliseconds} ms`, {
      hint: "give the client a longer timeoutMs, or the request a timeoutMs of its own",
    });
    this.#controller.abort(error);
  };
}
