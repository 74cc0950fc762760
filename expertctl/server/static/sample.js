/** What the charts show of one moment: a document of `/status/data`, and what changed since the last. */

/** Hues of series, as the style sheet names them. */
export const OWNERS = [
  ["base", "Base", "blue"],
  ["experts", "Experts", "orange"],
  ["kv", "Keys and values", "green"],
  ["buffers", "Buffers", "violet"],
];

/** Whether two documents are of one run of one server, the first one earlier. */
export function follows(before, after) {
  return before !== null && before.run === after.run && before.uptime < after.uptime;
}

/** A sample at a time of this page's clock; `before` is the document before, or null. */
export function sampleOf(data, before, at) {
  const known = before !== null && follows(before, data);
  const rate = (of) => (known ? (of(data) - of(before)) / (data.uptime - before.uptime) : null);
  const counted = known && missesOf(data) >= missesOf(before); // else counting began anew
  return {
    at,
    data,
    promptSpeed: rate((one) => one.tokens.prompt),
    answerSpeed: rate((one) => one.tokens.answer),
    perStep: known ? share(data, before, (one) => one.steps.rows, (one) => one.steps.count) : null,
    ttft: known ? share(data, before, (one) => one.ttft.seconds, (one) => one.ttft.count) : null,
    hits: counted ? share(data, before, hitsOf, askedOf) : null,
  };
}

/** How much of one there was for each of the other; null where there was none, or less than before. */
function share(data, before, of, by) {
  const several = by(data) - by(before);
  const found = of(data) - of(before);
  return several > 0 && found >= 0 ? found / several : null;
}

/** Routed slots whose expert was there, and all of them; what is not counted is none. */
export const hitsOf = ({ routed }) => sum(routed, ({ hits }) => hits);
const missesOf = ({ routed }) => sum(routed, ({ misses }) => misses);
export const askedOf = ({ routed }) => sum(routed, ({ hits, misses }) => hits + misses);

function sum(routed, of) {
  return (routed?.layers ?? []).reduce((total, layer) => total + of(layer), 0);
}

/** Whether a server was never asked anything. */
export function isUnused({ jobs }) {
  const { waiting, preparing, running, finished, failed, cancelled, refused } = jobs;
  return waiting + preparing + running + finished + failed + cancelled + refused === 0;
}

/** Bytes that are held, whoever owns them. */
export function held({ memory }) {
  return Object.values(memory.held).reduce((sum, size) => sum + size, 0);
}
