/** The routed experts of the base: which are in memory, and which were there when asked for. */

import { Chart } from "./chart.js";
import { byId, fill, pairs, say, tile } from "./elements.js";
import { bytes, count, nearPercent, percent, smallPercent, time } from "./numbers.js";
import { askedOf, hitsOf } from "./sample.js";

const MISSES = {
  exact: "A routed expert that is not in memory is read, and waited for.",
  skip: "A routed expert that is not in memory may be left out; those that are there take over its weight.",
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
  #tile = tile("Routed experts");

  /** Show samples, the last one being now. */
  show(samples) {
    const { data } = samples[samples.length - 1];
    const { routed } = data;
    byId("routed").hidden = routed === null;
    putIf(routed !== null, this.#tile.node, byId("tiles"));
    const isDrawn = routed !== null && !routed.whole && askedOf(data) > 0 && samples.some(({ hits }) => hits !== null);
    putIf(isDrawn, this.#chart.figure, byId("charts"));
    if (isDrawn) this.#chart.draw(samples);
    if (routed === null) return;
    this.#tile.show(...summary(data));
    showSums(data);
    showLayers(routed.layers);
  }
}

/** Where all are in memory nobody can be missing; and hits are only told where they are counted. */
function summary(data) {
  const { routed } = data;
  if (routed.whole) return [count(routed.experts), "all in memory"];
  const room = `room for ${count(routed.in_memory)} of ${count(routed.experts)}`;
  if (routed.layers.length === 0) return [count(routed.in_memory), `of ${count(routed.experts)} have room in memory`];
  return [nearPercent(hitsOf(data), askedOf(data)), `hits; ${room}`];
}

function showSums(data) {
  const { experts, whole, in_memory: inMemory, loads, read_bytes: readBytes, waited, mass, skipped, miss } = data.routed;
  say(byId("routed-policy"), whole ? `All ${count(experts)} are in memory.` : MISSES[miss]);
  byId("routed-sums").hidden = whole;
  pairs(byId("routed-sums"), [
    ["room in memory", `${count(inMemory)} of ${count(experts)}`],
    ["there when asked for", nearPercent(hitsOf(data), askedOf(data))],
    ["read", `${count(loads)} experts, ${bytes(readBytes)}`],
    ["waited for", time(waited)],
    ["left out of all weights", smallPercent(skipped, mass)],
  ]);
}

function showLayers(layers) {
  const rows = layers.map(({ layer, hits, misses, swaps, resident, experts }) => [
    count(layer),
    nearPercent(hits, hits + misses),
    `${count(resident)} of ${count(experts)}`,
    count(hits + misses),
    count(swaps),
  ]);
  byId("routed-scroll").hidden = rows.length === 0;
  fill(byId("routed-layers"), rows);
}

/** Have a node be the last of another, or nowhere. */
function putIf(isThere, node, parent) {
  if (!isThere) node.remove();
  else if (!node.isConnected) parent.append(node);
}
