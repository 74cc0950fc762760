/** The figures of the page: tiles, charts and tables, filled from samples. */

import { Chart } from "./chart.js";
import { byId, fill, pairs, say, tile } from "./elements.js";
import { bytes, count, mean, percent, shortSpeed, speed, time } from "./numbers.js";
import { Routed } from "./routed.js";
import { held, isUnused, OWNERS } from "./sample.js";

const JOBS = ["finished", "failed", "cancelled", "refused"];
const TIERS = { ram: "Main memory", device: "Device" };

/** Name, number and what stands below it, of a sample; and whether it is left out of an unused server. */
const TILES = [
  ["Answers now", ({ data }) => count(data.jobs.running), ({ data }) => `of ${count(data.jobs.rows)} at a time`],
  ["Queue", ({ data }) => count(data.jobs.waiting), ({ data }) => `of ${count(data.queue)} places · ${count(data.jobs.preparing)} prepared`],
  ["Answers", ({ answerSpeed }) => speed(answerSpeed ?? 0), ({ data }) => `${count(data.tokens.answer)} tokens so far`, true],
  ["Prompts", ({ promptSpeed }) => speed(promptSpeed ?? 0), ({ data }) => `${count(data.tokens.prompt)} read, ${count(data.tokens.reused)} reused`, true],
  ["Memory", ({ data }) => bytes(held(data)), ({ data }) => `${percent(held(data), data.memory.limit)} of ${bytes(data.memory.limit)}`],
  ["Keys and values", ({ data }) => percent(data.kv.in_use, data.kv.limit), ({ data }) => `${bytes(data.kv.in_use)} in use, ${bytes(data.kv.kept)} of ${bytes(data.kv.kept_limit)} kept`, true],
];

const CHARTS = [
  {
    title: "Jobs",
    ofJobs: true,
    whole: true,
    show: count,
    tick: count,
    least: 2,
    series: [
      { label: "Answers being written", hue: "blue", of: ({ data }) => data.jobs.running },
      { label: "Prepared", hue: "green", of: ({ data }) => data.jobs.preparing },
      { label: "In the queue", hue: "orange", of: ({ data }) => data.jobs.waiting },
    ],
  },
  {
    title: "Batch size",
    ofJobs: true,
    show: mean,
    tick: mean,
    least: 2,
    series: [{ label: "Texts in one step, mean", hue: "blue", of: ({ perStep }) => perStep }],
  },
  {
    title: "Answers written",
    ofJobs: true,
    show: speed,
    tick: shortSpeed,
    least: 10,
    series: [{ label: "Tokens of answers", hue: "blue", of: ({ answerSpeed }) => answerSpeed }],
  },
  {
    title: "Prompts read",
    ofJobs: true,
    show: speed,
    tick: shortSpeed,
    least: 10,
    series: [{ label: "Tokens of prompts", hue: "violet", of: ({ promptSpeed }) => promptSpeed }],
  },
  {
    title: "Time to the first token",
    ofJobs: true,
    show: time,
    tick: time,
    least: 0.01,
    series: [{ label: "Mean of the second", hue: "orange", of: ({ ttft }) => ttft }],
  },
  {
    title: "Memory by owner",
    show: bytes,
    tick: bytes,
    stacked: true,
    limit: ({ data }) => data.memory.limit,
    series: OWNERS.map(([owner, label, hue]) => ({ label, hue, of: ({ data }) => data.memory.held[owner] ?? 0 })),
  },
  {
    title: "Keys and values",
    show: bytes,
    tick: bytes,
    stacked: true,
    least: 1e6,
    series: [
      { label: "In use", hue: "green", of: ({ data }) => data.kv.in_use },
      { label: "Kept for later", hue: "blue", of: ({ data }) => data.kv.kept },
    ],
  },
];

/** Everything below the head of the page. */
export class Figures {
  #charts = CHARTS.map((options) => ({ chart: new Chart(options), ...options }));
  #drawn = "";
  #routed = new Routed();
  #tiles = TILES.map(([name]) => tile(name));

  constructor() {
    byId("tiles").append(...this.#tiles.map(({ node }) => node));
    say(byId("example"), example(location.origin));
  }

  /** Show samples, the last one being now. */
  show(samples, residents) {
    const sample = samples[samples.length - 1];
    const unused = isUnused(sample.data);
    byId("figures").hidden = false;
    byId("idle").hidden = !unused;
    TILES.forEach(([, number, below, ofUse], place) => {
      this.#tiles[place].node.hidden = unused && ofUse === true;
      this.#tiles[place].show(number(sample), below(sample));
    });
    this.#draw(samples, unused);
    byId("experts-part").hidden = residents === null;
    if (residents !== null) showExperts(sample.data.experts, residents);
    showTiers(sample.data.tiers);
    byId("jobs-part").hidden = unused;
    showJobs(sample.data.jobs);
    byId("totals").hidden = byId("loads-part").hidden && unused;
    this.#routed.show(samples);
  }

  /** Draw the charts that have something to show; those of jobs come and go together. */
  #draw(samples, unused) {
    const isBusy = this.#charts.some(({ ofJobs, series }) => ofJobs && hasValue(series, samples));
    const wanted = this.#charts.filter(({ ofJobs, series }) => (ofJobs ? isBusy : hasValue(series, samples)));
    const titles = wanted.map(({ title }) => title).join();
    if (titles !== this.#drawn) byId("charts").replaceChildren(...wanted.map(({ chart }) => chart.figure));
    this.#drawn = titles;
    byId("quiet").hidden = unused || isBusy;
    for (const { chart } of wanted) chart.draw(samples);
  }
}

/** Whether any series has been more than nothing. */
function hasValue(series, samples) {
  return samples.some((sample) => series.some(({ of }) => of(sample) > 0));
}

/** Those at work first, then those that are only in memory. */
function showExperts(busy, { able, in_memory: inMemory, listed }) {
  const sizes = new Map(listed.map(({ ref, size }) => [ref, size]));
  const idle = listed.filter(({ ref }) => !busy.some((one) => one.ref === ref));
  const all = [...busy, ...idle.map(({ ref, requests }) => ({ ref, running: 0, prepared: 0, requests }))];
  const rows = all.map(({ ref, running, prepared, requests }) => [
    ref,
    count(running),
    count(prepared),
    count(requests),
    sizes.has(ref) ? bytes(sizes.get(ref)) : "–",
  ]);
  byId("no-experts").hidden = rows.length > 0;
  byId("experts-scroll").hidden = rows.length === 0;
  const more = inMemory > listed.length ? `, ${count(inMemory - listed.length)} of them not listed` : "";
  say(byId("able"), `${count(able)} can answer here, ${count(inMemory)} are in memory${more}.`);
  fill(byId("experts"), rows);
}

function showTiers(tiers) {
  const used = Object.entries(tiers).filter(([, { hits, loads, evictions, nbytes }]) => hits + loads + evictions + nbytes > 0);
  byId("loads-part").hidden = used.length === 0;
  const rows = used.map(([name, { hits, loads, evictions, nbytes }]) => [
    TIERS[name] ?? name,
    count(hits),
    count(loads),
    count(evictions),
    bytes(nbytes),
  ]);
  fill(byId("tiers"), rows);
}

function showJobs(jobs) {
  pairs(byId("jobs"), JOBS.map((name) => [name, count(jobs[name])]));
}

function example(origin) {
  return [
    `curl ${origin}/v1/infer \\`,
    "  -H 'Content-Type: application/json' \\",
    `  -d '{"prompt": "Sort these numbers: 3, 1, 2"}'`,
  ].join("\n");
}
