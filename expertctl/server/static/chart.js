/**
 * One chart: lines, or areas on top of each other, over the last two minutes.
 *
 * It is read with the eyes, with a pointer, with the arrow keys, or from its label.
 */

import { drawn, element, say } from "./elements.js";

/** How far back a chart reaches, in milliseconds. */
export const SPAN = 120_000;

const HEIGHT = 168;
const EDGE = { left: 68, right: 10, top: 10, bottom: 22 };
/** Samples further apart than this are not joined: nothing is known of the time between. */
const GAP = 5_000;
const STEPS = [1, 2, 2.5, 5, 10];

/** The least round number that is not below a value. */
export function roundUp(value, whole) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const found = STEPS.map((step) => step * power).find((one) => one >= value * 0.9999);
  return whole ? Math.max(1, Math.ceil(found)) : found;
}

/**
 * `series` are `{label, hue, of}`, `of` giving a number or null for a sample; `limit` may draw a
 * line that is not to be crossed; `show` writes a number with its unit, and `tick` does so in short.
 */
export class Chart {
  #options;
  #samples = [];
  #width = 480;
  #top = 1;
  #chosen = null;
  #parts;

  constructor(options) {
    this.#options = options;
    this.#parts = partsOf(options);
    this.figure = this.#parts.figure;
    this.#listen();
  }

  /** Show these samples, the last one being now. */
  draw(samples) {
    this.#samples = samples;
    this.#render();
  }

  #render() {
    if (this.#samples.length === 0) return;
    this.#top = this.#highest();
    this.#frame();
    this.#curves();
    this.#limit();
    this.#readout();
    this.#label();
  }

  #now() {
    return this.#samples[this.#samples.length - 1].at;
  }

  #x(at) {
    const room = this.#width - EDGE.left - EDGE.right;
    return EDGE.left + room * (1 - (this.#now() - at) / SPAN);
  }

  #y(value) {
    const room = HEIGHT - EDGE.top - EDGE.bottom;
    return EDGE.top + room * (1 - Math.min(value, this.#top) / this.#top);
  }

  #highest() {
    const { limit, least = 0, whole = false } = this.#options;
    const values = this.#samples.flatMap((sample) => this.#levels(sample));
    const bound = limit ? limit(this.#samples[this.#samples.length - 1]) : 0;
    return roundUp(Math.max(least, bound, ...values.filter((value) => value !== null)), whole);
  }

  /** The height of each series in one sample, on top of those before it where they are stacked. */
  #levels(sample) {
    let below = 0;
    return this.#options.series.map(({ of }) => {
      const value = of(sample);
      if (value === null || !this.#options.stacked) return value;
      below += value;
      return below;
    });
  }

  #frame() {
    const { svg, grid, ticks } = this.#parts;
    svg.setAttribute("viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    const right = this.#width - EDGE.right;
    [0, 0.5, 1].forEach((share, index) => {
      const y = this.#y(share * this.#top);
      grid[index].setAttribute("d", `M${EDGE.left} ${y}H${right}`);
      ticks[index].setAttribute("x", String(EDGE.left - 8));
      ticks[index].setAttribute("y", String(y + 4));
      const skipped = this.#options.whole && share === 0.5 && this.#top % 2 === 1;
      say(ticks[index], skipped ? "" : this.#options.tick(share * this.#top));
    });
    const { begin, end } = this.#parts;
    begin.setAttribute("x", String(EDGE.left));
    end.setAttribute("x", String(right));
  }

  #curves() {
    const levels = this.#samples.map((sample) => this.#levels(sample));
    this.#parts.curves.forEach(({ line, area }, index) => {
      const runs = this.#runs(levels, index);
      line.setAttribute("d", runs.map((run) => pathOf(run.map(([x, y]) => [x, y]))).join(""));
      if (area === null) return;
      area.setAttribute("d", runs.map((run) => closed(run)).join(""));
    });
  }

  /** The unbroken runs of one series, each point with the height of what is below it. */
  #runs(levels, index) {
    const runs = [];
    let before = -Infinity;
    this.#samples.forEach(({ at }, place) => {
      const level = levels[place][index];
      if (level === null) {
        before = -Infinity;
        return;
      }
      const below = index === 0 ? 0 : levels[place][index - 1];
      if (at - before > GAP) runs.push([]);
      runs[runs.length - 1].push([this.#x(at), this.#y(level), this.#y(below ?? 0)]);
      before = at;
    });
    return runs;
  }

  #limit() {
    const { limit } = this.#options;
    if (!limit) return;
    const y = this.#y(limit(this.#samples[this.#samples.length - 1]));
    this.#parts.limit.setAttribute("d", `M${EDGE.left} ${y}H${this.#width - EDGE.right}`);
  }

  /** The sample that is pointed at, else the last one. */
  #shown() {
    const last = this.#samples[this.#samples.length - 1];
    if (this.#chosen === null) return last;
    const wanted = this.#now() - this.#chosen;
    const nearer = (a, b) => (Math.abs(a.at - wanted) <= Math.abs(b.at - wanted) ? a : b);
    return this.#samples.reduce(nearer, last);
  }

  #readout() {
    const sample = this.#shown();
    const { values, cursor, when } = this.#parts;
    this.#options.series.forEach(({ of }, index) => say(values[index], this.#written(of(sample))));
    const back = Math.round((this.#now() - sample.at) / 1000);
    say(when, this.#chosen === null ? "" : `${back} s ago`);
    const x = this.#x(sample.at);
    cursor.setAttribute("d", this.#chosen === null ? "" : `M${x} ${EDGE.top}V${this.#y(0)}`);
  }

  #written(value) {
    return value === null ? "–" : this.#options.show(value);
  }

  #label() {
    const said = this.#options.series.map(({ label, of }) => {
      const values = this.#samples.map(of).filter((value) => value !== null);
      if (values.length === 0) return `${label}: nothing yet`;
      const most = this.#written(Math.max(...values));
      return `${label}: ${this.#written(of(this.#shown()))}, at most ${most}`;
    });
    const back = this.#chosen === null ? "now" : this.#parts.when.textContent;
    this.#parts.svg.setAttribute("aria-label", `${this.#options.title}, ${back}. ${said.join("; ")}.`);
  }

  #choose(back) {
    this.#chosen = back === null ? null : Math.min(SPAN, Math.max(0, back));
    if (this.#samples.length === 0) return;
    this.#readout();
    this.#label();
  }

  #listen() {
    const { svg } = this.#parts;
    new ResizeObserver(([entry]) => {
      this.#width = Math.max(240, Math.round(entry.contentRect.width));
      this.#render();
    }).observe(svg);
    svg.addEventListener("pointermove", (event) => {
      const place = event.clientX - svg.getBoundingClientRect().left;
      const room = this.#width - EDGE.left - EDGE.right;
      this.#choose((1 - (place - EDGE.left) / room) * SPAN);
    });
    svg.addEventListener("pointerleave", () => this.#choose(null));
    svg.addEventListener("blur", () => this.#choose(null));
    svg.addEventListener("keydown", (event) => this.#step(event));
  }

  #step(event) {
    const steps = { ArrowLeft: 1000, ArrowRight: -1000, PageUp: 10_000, PageDown: -10_000 };
    const far = { Home: SPAN, End: 0 };
    if (event.key === "Escape") this.#choose(null);
    else if (event.key in far) this.#choose(far[event.key]);
    else if (event.key in steps) this.#choose((this.#chosen ?? 0) + steps[event.key]);
    else return;
    event.preventDefault();
  }
}

/** One point alone is a dot, as its line of no length has round ends. */
function pathOf(points) {
  const dot = points.length === 1 ? "h0" : "";
  return points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") + dot;
}

function closed(run) {
  const under = run.map(([x, , below]) => [x, below]).reverse();
  return `${pathOf([...run.map(([x, y]) => [x, y]), ...under])}Z`;
}

function partsOf({ title, series, stacked, limit }) {
  const grid = [0, 1, 2].map(() => drawn("path", { class: "grid" }));
  const ticks = [0, 1, 2].map(() => drawn("text", { class: "tick", "text-anchor": "end" }));
  const foot = { y: HEIGHT - 5, class: "tick" };
  const begin = drawn("text", { ...foot, "text-anchor": "start" }, "2 min ago");
  const end = drawn("text", { ...foot, "text-anchor": "end" }, "now");
  const curves = series.map(({ hue }) => ({
    area: stacked ? drawn("path", { class: `area ${hue}` }) : null,
    line: drawn("path", { class: `line ${hue}` }),
  }));
  const bound = drawn("path", { class: limit ? "limit" : "" });
  const cursor = drawn("path", { class: "cursor" });
  // The first series is painted last: where others are nothing above it, it is the one that is seen.
  const paths = curves.flatMap(({ area, line }) => (area === null ? [line] : [line, area]));
  const marks = [...grid, ...ticks, begin, end, ...paths.reverse(), bound, cursor];
  const svg = drawn("svg", { role: "img", tabindex: "0", height: HEIGHT }, ...marks);
  const when = element("span", { class: "when" });
  const values = series.map(() => element("strong"));
  const legend = series.map(({ label, hue }, index) =>
    element("li", {}, element("span", { class: `key ${hue}` }), `${label} `, values[index]),
  );
  const caption = element("figcaption", {}, element("h2", {}, title), when);
  const figure = element("figure", { class: "sheet" }, caption, svg);
  figure.append(element("ul", { class: "legend", "aria-hidden": "true" }, ...legend));
  return { figure, svg, grid, ticks, begin, end, curves, limit: bound, cursor, when, values };
}
