/**
 * The page: asks for the numbers once a second and shows them.
 *
 * An API key that is typed in lives in one variable of this module and goes nowhere but into the
 * header of these requests.
 */

import { SPAN } from "./chart.js";
import { byId, say } from "./elements.js";
import { Figures } from "./figures.js";
import { duration } from "./numbers.js";
import { follows, sampleOf } from "./sample.js";

const PERIOD = 1000;
/** What is in memory is asked for more rarely: there it may take a while to be told. */
const EXPERTS_PERIOD = 5000;
const LONGEST = 10_000;
const PATIENCE = 5000;

class Page {
  #figures = new Figures();
  #samples = [];
  #last = null;
  /** The experts in memory; null until it is told. */
  #residents = null;
  #residentsAt = -Infinity;
  #key = null;
  #timer = null;
  #isPaused = false;
  #failures = 0;
  #turn = 0;

  begin() {
    byId("ask").addEventListener("submit", (event) => this.#entered(event));
    byId("pause").addEventListener("click", () => this.#toggle());
    this.#ask();
  }

  /** Ask once, and again after a while; whatever asked before does so no more. */
  async #ask() {
    const turn = ++this.#turn;
    clearTimeout(this.#timer);
    const wait = await this.#asked();
    if (turn !== this.#turn || wait === null || this.#isPaused) return;
    this.#timer = setTimeout(() => this.#ask(), wait);
  }

  /** Ask and show; give how long to wait until the next time, null for ever. */
  async #asked() {
    try {
      const response = await this.#fetched("/status/data");
      if (response.status === 401 || response.status === 403) return this.#wantsKey();
      if (!response.ok) throw new Refusal(await reasonOf(response));
      this.#take(await response.json());
      this.#askForExperts();
      return PERIOD;
    } catch (error) {
      return this.#missed(error);
    }
  }

  /** Nobody waits for this one; what was told last is shown until it comes. */
  async #askForExperts() {
    const now = performance.now();
    if (now - this.#residentsAt < EXPERTS_PERIOD) return;
    this.#residentsAt = now;
    try {
      const response = await this.#fetched("/status/experts");
      if (!response.ok) return;
      this.#residents = await response.json();
      this.#figures.show(this.#samples, this.#residents);
    } catch {
      return; // the other numbers tell whether the server is there
    }
  }

  #fetched(path) {
    const headers = this.#key === null ? {} : { Authorization: `Bearer ${this.#key}` };
    const signal = AbortSignal.timeout(PATIENCE);
    return fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
  }

  #take(data) {
    if (this.#last !== null && follows(data, this.#last)) return; // it was overtaken on the way
    const now = performance.now();
    if (this.#last !== null && !follows(this.#last, data)) this.#samples = [];
    this.#samples = this.#samples.filter(({ at }) => now - at <= SPAN);
    this.#samples.push(sampleOf(data, this.#last, now));
    this.#last = data;
    this.#failures = 0;
    this.#head(data);
    this.#figures.show(this.#samples, this.#residents);
  }

  #head(data) {
    byId("ask").hidden = true;
    byId("pause").hidden = false;
    if (!this.#isPaused) state("live", "Live");
    say(byId("served"), data.base);
    document.title = `${data.base} · status · expertctl`;
    const parts = [`expertctl ${data.version}`, `up ${duration(data.uptime)}`];
    say(byId("foot"), [...parts, `texts of up to ${data.context} tokens`].join(" · "));
  }

  /** A server that cannot answer says why; one that is not there says nothing. */
  #missed(error) {
    this.#failures += 1;
    const said = error instanceof Refusal ? error.message : "No answer; trying again";
    if (error instanceof Refusal || this.#failures > 1) state("lost", said);
    return Math.min(PERIOD * 2 ** (this.#failures - 1), LONGEST);
  }

  /** Without a key there is nothing to show, nor to ask for. */
  #wantsKey() {
    const again = this.#key !== null;
    this.#key = null;
    byId("ask").hidden = false;
    byId("figures").hidden = true;
    byId("idle").hidden = true;
    byId("pause").hidden = true;
    state("wait", "Waiting for a key");
    if (again) say(byId("ask-why"), "The server does not take this key. Is it whole, and not revoked?");
    byId("key").focus();
    return null;
  }

  #entered(event) {
    event.preventDefault();
    const field = byId("key");
    this.#key = field.value.trim();
    field.value = "";
    this.#ask();
  }

  #toggle() {
    this.#isPaused = !this.#isPaused;
    byId("pause").setAttribute("aria-pressed", String(this.#isPaused));
    clearTimeout(this.#timer);
    if (this.#isPaused) state("wait", "Paused");
    else this.#ask();
  }
}

/** An answer that is no numbers. */
class Refusal extends Error {}

async function reasonOf(response) {
  const { error } = await response.json();
  return `${error.message}; trying again`;
}

/** Say how it goes; it is read out when it changes. */
function state(kind, text) {
  const node = byId("state");
  node.dataset.kind = kind;
  say(node, text);
}

new Page().begin();
