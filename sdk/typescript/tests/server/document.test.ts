/** Types and the server's own document, and types and its answers, name the same fields. */

import assert from "node:assert/strict";
import { describe, it } from "node:test";

import {
  ExpertClient,
  type Candidate,
  type Expert,
  type InferRequest,
  type InferResult,
  type Job,
  type MemoryUse,
  type Model,
  type MoeActivity,
  type MoeChange,
  type MoeGuide,
  type MoeLayer,
  type MoeResidence,
  type MoeUse,
  type NamedSchema,
  type Plan,
  type PlannedExpert,
  type PromptFeatures,
  type ResponseFormat,
  type RouteRequest,
  type RouteResult,
  type SamplingParams,
  type Started,
} from "../../src/index.js";
import { snakeName } from "../../src/names.js";
import { EXPERTS, KEY, URL_OF_SERVER } from "./surroundings.js";

/** Whether each field must be there; the compiler sees to it that none is left out. */
type Fields<T> = { readonly [K in keyof T]-?: undefined extends T[K] ? false : true };

const ROUTE_REQUEST: Fields<RouteRequest> = {
  prompt: true,
  temperature: false,
  maxTokens: false,
  topP: false,
  topK: false,
  minP: false,
  repetitionPenalty: false,
  forceExperts: false,
  excludeExperts: false,
  maxExperts: false,
  noExperts: false,
  stop: false,
  seed: false,
};
const INFER_REQUEST: Fields<InferRequest> = {
  ...ROUTE_REQUEST,
  template: false,
  body: false,
  conversation: false,
  truncate: false,
  base: false,
  contextSize: false,
  responseFormat: false,
  userId: false,
  sessionId: false,
  cacheKey: false,
  metadata: false,
  priority: false,
  timeoutMs: false,
};
const RESPONSE_FORMAT: Fields<ResponseFormat> = { type: true, schema: false, jsonSchema: false, name: false };
const NAMED_SCHEMA: Fields<NamedSchema> = { name: true, schema: false, description: false, strict: false };
const JOB: Fields<Job> = {
  jobId: true,
  status: true,
  submittedAt: true,
  startedAt: true,
  endedAt: true,
  estimatedWaitMs: true,
  text: true,
  result: true,
  error: true,
};
const JOB_ERROR: Fields<NonNullable<Job["error"]>> = { code: true, message: true, hint: true };
const EXPERT: Fields<Expert> = {
  ref: true,
  name: true,
  version: true,
  description: true,
  license: true,
  kind: true,
  contentDigest: true,
  packageDigest: true,
  base: true,
  size: true,
  fits: true,
  revoked: true,
  inMemory: true,
};

const MOE_CHANGE: Fields<MoeChange> = { mode: false, reset: false, profile: false, pin: false, exchange: false };

interface Schema {
  readonly properties: Record<string, unknown>;
  readonly required?: readonly string[];
}

const SCHEMAS: [string, Record<string, boolean>, readonly string[]][] = [
  ["RouteFields", ROUTE_REQUEST, []],
  ["InferRequest", INFER_REQUEST, ["stream"]],
  ["ResponseFormat", RESPONSE_FORMAT, []],
  ["NamedSchema", NAMED_SCHEMA, []],
  ["JobDocument", JOB, []],
  ["JobError", JOB_ERROR, []],
  ["ExpertDocument", EXPERT, []],
  ["ObserveRequest", MOE_CHANGE, []],
];

async function schemas(): Promise<Record<string, Schema>> {
  const answer = await fetch(`${URL_OF_SERVER}/openapi.json`);
  const document = (await answer.json()) as { components: { schemas: Record<string, Schema> } };
  return document.components.schemas;
}

describe("the OpenAPI document", () => {
  for (const [name, fields, ours] of SCHEMAS) {
    it(`has the fields of ${name} that the types have, and demands the same ones`, async () => {
      const schema = (await schemas())[name];
      assert.ok(schema !== undefined, `there is no ${name}`);
      const named = [...Object.keys(fields).map(snakeName), ...ours];
      assert.deepEqual(Object.keys(schema.properties).sort(), named.sort());
      const demanded = Object.entries(fields).filter(([, must]) => must).map(([field]) => snakeName(field));
      assert.deepEqual([...(schema.required ?? [])].sort(), demanded.sort());
    });
  }
});

const PLAN: Fields<Plan> = { identity: true, seed: true, base: true, experts: true, params: true };
const PLANNED_EXPERT: Fields<PlannedExpert> = {
  ref: true,
  contentDigest: true,
  packageDigest: true,
  kind: true,
  score: true,
  weight: true,
  reason: true,
};
const PARAMS: Fields<SamplingParams> = {
  temperature: true,
  topP: true,
  topK: true,
  minP: true,
  repetitionPenalty: true,
  presencePenalty: true,
  frequencyPenalty: true,
  maxTokens: true,
  stop: true,
};
const RESULT: Fields<InferResult> = {
  jobId: true,
  submittedAt: true,
  text: true,
  tokensGenerated: true,
  expertsUsed: true,
  latencyMs: true,
  finishReason: true,
  stoppedBy: true,
  stages: true,
  validationPassed: true,
  plan: true,
  dropped: true,
  tokens: true,
  timingsMs: true,
  prefillTokensPerS: true,
  decodeTokensPerS: true,
  memory: true,
  cache: true,
  moe: false,
  numerics: true,
  bytesRead: true,
  threads: true,
  seed: true,
  notes: true,
  warnings: true,
};
const STAGES: Fields<InferResult["stages"]> = {
  reception: true,
  reasoning: true,
  preparation: true,
  inference: true,
  postProcessing: true,
};
const MEMORY: Fields<MemoryUse> = { budget: true, peak: true, base: true, experts: true, kv: true, buffers: true };
const TOKENS: Fields<InferResult["tokens"]> = { prompt: true, generated: true, ids: true };
const CACHE: Fields<InferResult["cache"]> = { expertsHit: true, expertsLoaded: true, kvReusedTokens: true };
const MOE: Fields<MoeUse> = {
  miss: true,
  cold: true,
  layers: true,
  experts: true,
  slots: true,
  inMemory: true,
  requests: true,
  misses: true,
  fallbackRate: true,
  skippedMass: true,
  loads: true,
  readAhead: true,
  bytesRead: true,
  waitedMs: true,
  swaps: true,
  lent: true,
};
const RESIDENCE: Fields<MoeResidence> = {
  miss: true,
  layers: true,
  experts: true,
  slots: true,
  inMemory: true,
  cold: true,
};
const GUIDE: Fields<MoeGuide> = { exchange: true, pinned: true };
const LAYER: Fields<MoeLayer> = {
  layer: true,
  calls: true,
  hotSlotsTotal: true,
  coldSlotsTotal: true,
  hotSlotRatio: true,
  requests: true,
  missedRequests: true,
  fallbackRate: true,
  swaps: true,
  parallelHotLaneWallTimePerCallUs: true,
  parallelColdLaneWallTimePerCallUs: true,
  experts: true,
  hotExperts: true,
  coldExperts: true,
};
const ACTIVITY: Fields<MoeActivity> = {
  enabled: true,
  mode: true,
  schema: true,
  layers: true,
  nExpert: false,
  nExpertUsed: false,
  updates: false,
  overflowResets: false,
  base: false,
  residence: false,
  guide: false,
};
const NUMERICS: Fields<InferResult["numerics"]> = { backend: true, dtype: true, adapterDtype: true, deterministic: true, klDivergence: false };
const STARTED: Fields<Started> = { jobId: true, submittedAt: true, plan: true, tokens: true };
const ROUTE: Fields<RouteResult> = {
  plan: true,
  candidates: true,
  encoder: true,
  threshold: true,
  prompt: true,
  notes: true,
  warnings: true,
  timingsMs: true,
};
const CANDIDATE: Fields<Candidate> = {
  ref: true,
  contentDigest: true,
  chosen: true,
  score: true,
  reason: true,
  features: true,
  flags: true,
};
const FEATURES: Fields<Candidate["features"]> = {
  cosine: true,
  share: true,
  support: true,
  keywords: true,
  hint: true,
  success: true,
  vramMb: true,
  priority: true,
};
const PROMPT: Fields<PromptFeatures> = {
  characters: true,
  language: true,
  hasJson: true,
  hasCode: true,
  task: true,
  format: true,
};
const MODEL: Fields<Model> = { id: true, object: true, created: true, ownedBy: true };

/** The value has the fields that must be there, and no others than these. */
function demand(value: object | undefined, fields: Record<string, boolean>): void {
  assert.ok(value !== undefined);
  const known = Object.keys(fields).filter((name) => fields[name] === true || name in value);
  assert.deepEqual(Object.keys(value).sort(), known.sort());
}

describe("the schema of an answer", () => {
  it("has the fields of moe that the type has", async () => {
    const moe = (await schemas())["InferAnswer"]?.properties["moe"] as Schema | undefined;
    assert.deepEqual(Object.keys(moe?.properties ?? {}).sort(), Object.keys(MOE).map(snakeName).sort());
    assert.deepEqual([...(moe?.required ?? [])].sort(), Object.keys(MOE).map(snakeName).sort());
  });
});

/** The wire has a field of each of these names, and perhaps others. */
function demandNamed(schema: Schema | undefined, fields: Record<string, boolean>): void {
  const there = Object.keys(schema?.properties ?? {});
  assert.deepEqual(Object.keys(fields).map(snakeName).filter((name) => !there.includes(name)), []);
}

describe("the schema of what was counted", () => {
  it("has the fields of the types", async () => {
    const { MoeActivity: activity, MoeLayer: layer } = await schemas();
    demandNamed(activity, ACTIVITY);
    demandNamed(layer, LAYER);
    demandNamed(activity?.properties["residence"] as Schema | undefined, RESIDENCE);
    demandNamed(activity?.properties["guide"] as Schema | undefined, GUIDE);
  });
});

describe("the answers", () => {
  const client = new ExpertClient({ baseUrl: URL_OF_SERVER, apiKey: KEY });
  const asked = { prompt: "sort these numbers", maxTokens: 3, forceExperts: [EXPERTS[0] ?? ""] };

  it("of infer have the fields of the types", async () => {
    const result = await client.infer(asked);
    demand(result, RESULT);
    demand(result.plan, PLAN);
    demand(result.plan.params, PARAMS);
    demand(result.plan.experts[0], PLANNED_EXPERT);
    demand(result.stages, STAGES);
    demand(result.memory, MEMORY);
    demand(result.tokens, TOKENS);
    demand(result.cache, CACHE);
    demand(result.numerics, NUMERICS);
    demand(result.bytesRead, { ssd: true, ram: true });
    const timings = ["route", "queue", "load", "prefill", "ttft", "decode", "post", "total"];
    assert.deepEqual(Object.keys(result.timingsMs).filter((name) => !timings.includes(name)), []);
  });

  it("of inferStream begin with the fields of the types", async () => {
    const stream = client.inferStream(asked);
    const first = await stream.next();
    await stream.return();
    demand(first.value?.started, STARTED);
    demand(first.value?.started?.tokens, { prompt: true, reused: true });
  });

  it("of route have the fields of the types", async () => {
    const result = await client.route({ prompt: "sort these numbers" });
    demand(result, ROUTE);
    demand(result.candidates[0], CANDIDATE);
    demand(result.candidates[0]?.features, FEATURES);
    demand(result.prompt, PROMPT);
  });

  it("of jobs, experts and models have the fields of the types", async () => {
    const { jobId } = await client.jobs.submit(asked);
    const job = await client.jobs.wait(jobId);
    demand(job, JOB);
    demand(job.result ?? undefined, RESULT);
    demand((await client.experts())[0], EXPERT);
    demand((await client.models())[0], MODEL);
    demand(await client.moe(), ACTIVITY);
  });
});
