import assert from "node:assert/strict";
import { describe, it } from "node:test";

import {
  demandResult,
  ExpertClient,
  ForbiddenError,
  IncompatibleError,
  type InferRequest,
  NoAnswerError,
  NotFoundError,
  RateLimitError,
  UnauthenticatedError,
  UsageError,
} from "../../src/index.js";
import { BASE, EXPERTS, KEY, OTHER_KEY, SLOW_KEY, URL_OF_SERVER } from "./surroundings.js";

const client = new ExpertClient({ baseUrl: URL_OF_SERVER, apiKey: KEY });
const [FIRST = ""] = EXPERTS;
const QUESTION: InferRequest = {
  prompt: "sort these numbers: 3, 1, 2",
  temperature: 0,
  maxTokens: 12,
  forceExperts: [FIRST],
};
/** A text that goes on until the context is full, or somebody ends it. */
const LONG: InferRequest = {
  prompt: "Sort: 3, 1, 2",
  maxTokens: 100_000,
  forceExperts: [FIRST],
  temperature: 0,
};

async function running(): Promise<number> {
  const headers = { authorization: `Bearer ${KEY}` };
  const answer = await fetch(`${URL_OF_SERVER}/status/data`, { headers });
  return ((await answer.json()) as { jobs: { running: number } }).jobs.running;
}

describe("infer", () => {
  it("answers with the expert that is named", async () => {
    const result = await client.infer(QUESTION);
    assert.equal(result.tokens.generated, result.tokensGenerated);
    assert.ok(result.tokensGenerated > 0 && result.tokensGenerated <= 12);
    assert.deepEqual(result.expertsUsed, [`${FIRST}@1.0.0`]);
    assert.deepEqual(result.plan.experts.map(({ ref }) => ref), result.expertsUsed);
    assert.equal(result.plan.base, BASE);
    assert.equal(result.plan.params.maxTokens, 12);
    assert.equal(result.plan.params.temperature, 0);
    assert.ok(result.latencyMs > 0 && result.timingsMs.total > 0);
    assert.ok(Date.parse(result.submittedAt) <= Date.now());
  });

  it("gives the same text twice where nothing is drawn", async () => {
    const [one, other] = await Promise.all([client.infer(QUESTION), client.infer(QUESTION)]);
    assert.equal(one.text, other.text);
  });

  it("sends every setting under the name that the server knows", async () => {
    const result = await client.infer({
      ...QUESTION,
      temperature: 0.7,
      topP: 0.9,
      topK: 40,
      minP: 0.01,
      repetitionPenalty: 1.2,
      maxExperts: 3,
      excludeExperts: [EXPERTS[1] ?? ""],
      stop: ["never", "ever"],
      seed: 7,
      template: "{prompt}: {body}",
      body: "9, 8",
      contextSize: 512,
      responseFormat: { type: "json_schema", jsonSchema: { name: "any", schema: { type: "object", properties: { userName: {} } } } },
      userId: "user-1",
      sessionId: "session-1",
      cacheKey: "key-1",
      metadata: { traceId: "1", trace_id: "2" },
      priority: 9,
      timeoutMs: 60_000,
    });
    const { params } = result.plan;
    assert.deepEqual(
      [params.temperature, params.topP, params.topK, params.minP, params.repetitionPenalty],
      [0.7, 0.9, 40, 0.01, 1.2],
    );
    assert.deepEqual(params.stop, ["never", "ever"]);
    assert.equal(result.seed, 7);
    assert.equal(result.validationPassed, null); // the limit cut the answer
  });

  it("ends with what is there when its time is over", async () => {
    const result = await client.infer({ ...LONG, timeoutMs: 300 });
    assert.equal(result.finishReason, "timeout");
    assert.ok(result.tokensGenerated > 0);
  });
});

describe("inferStream", () => {
  it("gives the text of infer in pieces", async () => {
    const whole = await client.infer(QUESTION);
    const chunks = [];
    for await (const chunk of client.inferStream(QUESTION)) chunks.push(chunk);
    assert.equal(chunks.map(({ text }) => text).join(""), whole.text);
    assert.equal(chunks[0]?.started?.plan.identity, whole.plan.identity);
    assert.equal(chunks.at(-1)?.result?.text, whole.text);
    assert.equal(chunks.at(-1)?.result?.jobId, chunks[0]?.started?.jobId);
  });

  it("has its result at hand once it was read, as often as that is asked for", async () => {
    const stream = client.inferStream(QUESTION);
    const texts: string[] = [];
    for await (const { text } of stream) texts.push(text);
    const result = await stream.result();
    assert.equal(result.text, texts.join(""));
    assert.equal(await stream.result(), result);
  });

  it("has no result when the loop is left", async () => {
    const stream = client.inferStream(LONG);
    for await (const { text } of stream) if (text !== "") break;
    await assert.rejects(stream.result(), NoAnswerError);
  });

  it("waits for a reader who is at work for longer than the server may be silent", async () => {
    const hasty = new ExpertClient({ baseUrl: URL_OF_SERVER, apiKey: KEY, timeoutMs: 3000 });
    const stream = hasty.inferStream(QUESTION);
    for await (const { started } of stream)
      if (started !== undefined) await new Promise((resolve) => setTimeout(resolve, 3500));
    assert.equal((await stream.result()).text, (await client.infer(QUESTION)).text);
  });

  it("frees the server when the loop is left", async () => {
    for await (const { text } of client.inferStream(LONG)) if (text !== "") break;
    while ((await running()) > 0) await new Promise((resolve) => setTimeout(resolve, 10));
  });

  it("frees the server when a signal is aborted", async () => {
    const [controller, reason] = [new AbortController(), new Error("enough")];
    const stream = client.inferStream(LONG, { signal: controller.signal });
    await stream.next();
    controller.abort(reason);
    await assert.rejects(stream.result(), reason);
    while ((await running()) > 0) await new Promise((resolve) => setTimeout(resolve, 10));
  });

  it("throws what the server refuses", async () => {
    await assert.rejects(client.inferStream({ prompt: "" }).result(), UsageError);
  });
});

describe("a job", () => {
  it("goes on by itself and is there when it is asked for", async () => {
    const submitted = await client.jobs.submit(QUESTION);
    assert.ok(["queued", "processing"].includes(submitted.status));
    assert.equal(submitted.result, null);
    const job = await client.jobs.wait(submitted.jobId);
    assert.equal(job.status, "finished");
    assert.equal(demandResult(job).text, (await client.infer(QUESTION)).text);
    assert.equal(job.text, demandResult(job).text);
    assert.ok(job.endedAt !== null && job.startedAt !== null && job.startedAt <= job.endedAt);
  });

  it("ends where it is when it is cancelled, with what is there of the answer", async () => {
    const { jobId } = await client.jobs.submit(LONG);
    while ((await client.jobs.get(jobId)).text === "") await new Promise((resolve) => setTimeout(resolve, 10));
    const { text } = await client.jobs.cancel(jobId);
    const job = await client.jobs.wait(jobId);
    assert.equal(job.status, "cancelled");
    assert.notEqual(job.endedAt, null);
    const partial = demandResult(job);
    assert.equal(partial.finishReason, "cancelled");
    assert.ok(text !== "" && partial.text.startsWith(text));
    assert.equal(job.text, partial.text);
    while ((await running()) > 0) await new Promise((resolve) => setTimeout(resolve, 10));
  });

  it("is nobody else's", async () => {
    const { jobId } = await client.jobs.submit(QUESTION);
    const other = new ExpertClient({ baseUrl: URL_OF_SERVER, apiKey: OTHER_KEY });
    await assert.rejects(other.jobs.get(jobId), NotFoundError);
    await assert.rejects(other.jobs.cancel(jobId), NotFoundError);
    assert.equal((await client.jobs.wait(jobId)).status, "finished");
  });

  it("that is not there is not found", async () => {
    await assert.rejects(client.jobs.get("0".repeat(32)), NotFoundError);
    await assert.rejects(client.jobs.get("a/../b c?d#e"), (error) => error instanceof NotFoundError || error instanceof UsageError);
  });
});

describe("a caller who asks too often", () => {
  const options = { baseUrl: URL_OF_SERVER, apiKey: SLOW_KEY, timeoutMs: 4000 };

  it("is told so, and not that the server is silent", async () => {
    const calls = Array.from({ length: 12 }, () => new ExpertClient({ ...options, retries: 0 }).models());
    const told = (await Promise.allSettled(calls)).filter(({ status }) => status === "rejected");
    assert.ok(told.length > 0);
    for (const one of told) {
      const error: unknown = one.status === "rejected" && one.reason;
      assert.ok(error instanceof RateLimitError);
      assert.ok(error.retryAfter !== undefined && error.retryAfter * 1000 > options.timeoutMs);
    }
    assert.ok((await new ExpertClient({ ...options, retries: 1 }).models()).length > 0);
  });
});

describe("what is there", () => {
  it("is told to whom the environment names, with its key", async () => {
    [process.env["EXPERT_SERVER"], process.env["EXPERT_API_KEY"]] = [URL_OF_SERVER, KEY];
    assert.deepEqual(await new ExpertClient().models(), await client.models());
    process.env["EXPERT_SERVER"] = "http://127.0.0.1:1";
    await assert.rejects(new ExpertClient({ baseUrl: URL_OF_SERVER }).models(), UnauthenticatedError);
  });

  it("is told by experts, models and route", async () => {
    const experts = await client.experts();
    assert.deepEqual(experts.map(({ name }) => name), [...EXPERTS].sort());
    const models = (await client.models()).map(({ id }) => id);
    assert.deepEqual([...models].sort(), [...EXPERTS, BASE, "auto"].sort());
    const { plan, candidates } = await client.route({ prompt: QUESTION.prompt, forceExperts: [FIRST] });
    assert.equal(plan.experts[0]?.ref, `${FIRST}@1.0.0`);
    assert.ok(candidates.every(({ features }) => typeof features.vramMb === "number"));
  });
});

describe("routed experts", () => {
  it("are none of a dense base, where nothing is counted and nothing can be changed", async () => {
    assert.deepEqual((await client.moe()).layers, []);
    await assert.rejects(client.changeMoe({ reset: true }), IncompatibleError);
    await assert.rejects(client.changeMoe({}), UsageError);
    const other = new ExpertClient({ baseUrl: URL_OF_SERVER, apiKey: OTHER_KEY });
    await assert.rejects(other.changeMoe({ reset: true }), ForbiddenError);
  });
});

describe("a refusal", () => {
  it("of a field says which", async () => {
    const wrong = { prompt: "?", maxTokens: -1 };
    await assert.rejects(client.infer(wrong), (error) => error instanceof UsageError && /max_tokens/.test(error.message));
  });

  it("of an expert that is not installed is a NotFoundError with a hint", async () => {
    await assert.rejects(
      client.infer({ prompt: "?", forceExperts: ["acme/nothing"] }),
      (error) => error instanceof NotFoundError && error.hint !== "" && (error.status ?? 0) === 404,
    );
  });

  it("of a key that is none is an UnauthenticatedError with the id of the request", async () => {
    const stranger = new ExpertClient({ baseUrl: URL_OF_SERVER, apiKey: `xpk_${"A".repeat(43)}` });
    await assert.rejects(stranger.infer(QUESTION), (error) => {
      assert.ok(error instanceof UnauthenticatedError);
      assert.match(error.requestId ?? "", /^req_/);
      return true;
    });
  });
});
