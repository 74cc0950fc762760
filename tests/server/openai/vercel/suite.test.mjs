// The Vercel AI SDK on a server whose answers are known; see ../test_node_client.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, jsonSchema, streamObject, streamText, tool } from "ai";

const hello = process.env.EXPERT_TEST_HELLO;
const provider = createOpenAICompatible({
  name: "expertctl",
  baseURL: process.env.EXPERT_TEST_URL,
  apiKey: process.env.EXPERT_TEST_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const usual = { model: provider("tiny"), temperature: 0, maxRetries: 0 };
const weather = tool({
  description: "The weather of a city",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } } }),
});
const sorted = jsonSchema({
  type: "object",
  properties: { sorted: { type: "array", items: { type: "integer" } } },
  required: ["sorted"],
  additionalProperties: false,
});

test("a text has its words, its end and its tokens", async () => {
  const answer = await generateText({ ...usual, prompt: "Hi" });
  assert.equal(answer.text, hello);
  assert.equal(answer.finishReason, "stop");
  assert.ok(answer.usage.outputTokens > 0);
});

test("a stream comes in pieces and ends with its usage", async () => {
  const answer = streamText({ ...usual, prompt: "Hi" });
  const pieces = [];
  for await (const piece of answer.textStream) pieces.push(piece);
  assert.ok(pieces.length > 1);
  assert.equal(pieces.join(""), hello);
  assert.ok((await answer.usage).inputTokens > 0);
});

test("a tool is called, with its arguments", async () => {
  const asked = { ...usual, prompt: "What is the weather?", tools: { weather } };
  const whole = await generateText(asked);
  assert.deepEqual(whole.toolCalls[0].input, { city: "Paris" });
  assert.equal(whole.finishReason, "tool-calls");
  const streamed = streamText(asked);
  await streamed.consumeStream();
  assert.deepEqual((await streamed.toolCalls)[0].input, { city: "Paris" });
});

test("an object is read by its schema, at once and while it is written", async () => {
  const asked = { ...usual, schema: sorted, prompt: "Sort, as JSON" };
  assert.deepEqual((await generateObject(asked)).object, { sorted: [1, 2, 3] });
  const streamed = streamObject(asked);
  let last;
  for await (const partial of streamed.partialObjectStream) last = partial;
  assert.deepEqual(last, { sorted: [1, 2, 3] });
});

test("a prompt that is too long is refused in the words that clients look for", async () => {
  await assert.rejects(generateText({ ...usual, prompt: "long ".repeat(5000) }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /maximum context length/);
    assert.equal(error.isRetryable, false);
    return true;
  });
});
