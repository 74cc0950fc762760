import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { camelName, fromWire, snakeName, toWire, type Wire } from "../src/names.js";
import type { MoeActivity, MoeChange } from "../src/moe.js";
import type { InferRequest } from "../src/request.js";

const WORDS: [string, string][] = [
  ["prompt", "prompt"],
  ["maxTokens", "max_tokens"],
  ["topP", "top_p"],
  ["kvReusedTokens", "kv_reused_tokens"],
  ["prefillTokensPerS", "prefill_tokens_per_s"],
  ["sha256", "sha256"],
];

/** Compiles only where the two types are one and the same. */
type Same<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false;

describe("the mapping of names", () => {
  for (const [camel, snake] of WORDS) {
    it(`makes ${snake} of ${camel}, and back`, () => {
      assert.equal(snakeName(camel), snake);
      assert.equal(camelName(snake), camel);
    });
  }

  it("reaches every level, and lists too", () => {
    const ours = { maxTokens: 1, deepPart: { someList: [{ topP: 0.5 }, "leftAlone", null] } };
    const theirs = { max_tokens: 1, deep_part: { some_list: [{ top_p: 0.5 }, "leftAlone", null] } };
    assert.deepEqual(toWire(ours), theirs);
    assert.deepEqual(fromWire<typeof ours>(toWire(ours)), ours);
  });

  it("leaves what is undefined out, and keeps what is null, false, 0 or empty", () => {
    const given = { topK: undefined, seed: 0, stop: "", isOpen: false, nothing: null };
    assert.deepEqual(toWire(given), { seed: 0, stop: "", is_open: false, nothing: null });
  });

  it("never renames keys of the user", () => {
    const metadata = { traceId: "1", trace_id: "2", "two words": "3" };
    const schema = { type: "object", properties: { userName: { minLength: 1 } }, additionalProperties: false };
    const request: InferRequest = {
      prompt: "userName and user_name",
      metadata,
      responseFormat: { type: "json_schema", jsonSchema: { name: "aUser", schema } },
    };
    assert.deepEqual(toWire(request), {
      prompt: "userName and user_name",
      metadata,
      response_format: { type: "json_schema", json_schema: { name: "aUser", schema } },
    });
    assert.deepEqual(fromWire<InferRequest>(toWire(request)), request);
  });

  it("gives a profile back as the server wrote it", () => {
    const layer = {
      layer: 1,
      hot1_slots_total: 3,
      parallel_hot_lane_wall_time_per_call_us: 120.5,
      parallel_fallback_reasons: { hot_not_cuda: 1 },
      experts: [[0, 2], [3, 2]],
    };
    const document = { schema: "llama.cpp.moe_layer_opt_perf.v1", n_expert_used: 2, layers: [layer], guide: { pinned: { "1": [3] } } };
    const seen = fromWire<MoeActivity>(document);
    assert.equal(seen.layers[0]?.parallelHotLaneWallTimePerCallUs, 120.5);
    assert.deepEqual(toWire<MoeChange>({ profile: seen, pin: 8 }), { profile: document, pin: 8 });
    const ofAFile = { num_prompts: 1, layers: { "1": { activation_counts: { "3": 1 } } } };
    assert.deepEqual(toWire<MoeChange>({ profile: ofAFile }), { profile: ofAFile });
  });

  it("keeps a key that would be the prototype of an object an ordinary one", () => {
    const document = JSON.parse('{"__proto__": {"isAdmin": true}, "some_name": 1}') as object;
    const made = fromWire<object>(document);
    assert.equal(Reflect.get(made, "isAdmin"), undefined);
    assert.ok(Object.hasOwn(made, "__proto__"));
  });

  it("has the same rule in its types", () => {
    const isSame: Same<
      Wire<{ maxTokens: number; deepPart: readonly { topP: number }[]; metadata: { someKey: 1 } }>,
      { max_tokens: number; deep_part: { top_p: number }[]; metadata: { someKey: 1 } }
    > = true;
    assert.ok(isSame);
  });
});
