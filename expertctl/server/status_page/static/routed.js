/** The routed experts of the base: who is in memory, and who was there when he was asked for. */

import { Chart } from "./chart.js";
import { byId, fill, pairs, say } from "./elements.js";
import { bytes, count, percent, smallPercent, time } from "./numbers.js";

const MISSES = {
  exact: "An expert that is not in memory is read, and waited for.",
  skip: "An expert that is not in memory may be left out; those that are there take over its weight.",
};
const CHART = {
  title: "Hits of routed experts",
  show: (share) => percent(share, 1),
  tick: (share) => percent(share, 1),
  least: 1,
  series: [{ label: "In memory when they were asked for", hue: "green", of: ({ hits }) => hits }],
};

/** The part of the page that is there only where the base has any. */
export class Routed {
  #chart = new Chart(CHART);

  /** Show samples, the last one being now. */
  show(samples) {
    const { routed } = samples[samples.length - 1].data;
    byId("routed").hidden = routed === null;
    const figure = this.#chart.figure;
    if (routed === null) {
      figure.remove();
      return;
    }
    if (!figure.isConnected) byId("charts").append(figure);
    this.#chart.draw(samples);
    showSums(routed);
    showLayers(routed.layers);
  }
}

function showSums(routed) {
  const { experts, in_memory: inMemory, loads, read_bytes: readBytes, waited, mass, skipped } = routed;
  const isWhole = inMemory >= experts;
  say(byId("routed-policy"), isWhole ? "All of them are in memory." : MISSES[routed.miss]);
  pairs(byId("routed-sums"), [
    ["in memory", `${count(inMemory)} of ${count(experts)}`],
    ["read", `${count(loads)} experts, ${bytes(readBytes)}`],
    ["waited for", time(waited)],
    ["left out of all weights", smallPercent(skipped, mass)],
  ]);
}

function showLayers(layers) {
  const rows = layers.map(({ layer, hits, misses, swaps, resident, experts }) => [
    count(layer),
    hits + misses > 0 ? percent(hits, hits + misses) : "–",
    `${count(resident)} of ${count(experts)}`,
    count(hits + misses),
    count(swaps),
  ]);
  byId("routed-scroll").hidden = rows.length === 0;
  fill(byId("routed-layers"), rows);
}
