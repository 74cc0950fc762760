// The official client on a server whose answers are known; see ../test_node_client.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI, {
  APIConnectionTimeoutError,
  APIUserAbortError,
  AuthenticationError,
  BadRequestError,
  NotFoundError,
} from "openai";

const baseURL = process.env.EXPERT_TEST_URL;
const hello = process.env.EXPERT_TEST_HELLO;
const client = new OpenAI({ apiKey: process.env.EXPERT_TEST_KEY, baseURL, maxRetries: 0 });
const says = (content) => ({ model: "tiny", temperature: 0, messages: [{ role: "user", content }] });
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { type: "string" } } },
  },
};

test("a chat has its words, its end and its tokens", async () => {
  const answer = await client.chat.completions.create(says("Hi"));
  assert.equal(answer.choices[0].message.content, hello);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.equal(answer.expertctl.plan.base, "tiny");
  assert.match(answer._request_id, /^req_/);
});

test("a stream comes word by word, with its usage at the end", async () => {
  const stream = await client.chat.completions.create({
    ...says("Hi"),
    stream: true,
    stream_options: { include_usage: true },
  });
  const words = [];
  let usage = null;
  for await (const chunk of stream) {
    words.push(chunk.choices[0]?.delta.content ?? "");
    usage = chunk.usage ?? usage;
  }
  assert.equal(words.join(""), hello);
  assert.ok(words.filter(Boolean).length > 2);
  assert.ok(usage.completion_tokens > 2);
});

test("the helper for streams puts the answers together", async () => {
  const stream = client.chat.completions.stream({ ...says("both"), tools: [weather] });
  const answer = await stream.finalChatCompletion();
  const calls = answer.choices[0].message.tool_calls;
  assert.deepEqual(calls.map((call) => call.function.arguments), ['{"city": "Rome"}', '{"city": "Paris"}']);
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
});

test("tools are run by the client, and their answers are read", async () => {
  const asked = [];
  const runner = client.chat.completions.runTools({
    ...says("The weather in Paris?"),
    tools: [
      {
        type: "function",
        function: {
          ...weather.function,
          parse: JSON.parse,
          function: ({ city }) => {
            asked.push(city);
            return "sunny";
          },
        },
      },
    ],
  });
  assert.equal(await runner.finalContent(), "It is sunny in Paris");
  assert.deepEqual(asked, ["Paris"]);
});

test("several answers and their scores come by their index", async () => {
  const answer = await client.chat.completions.create({ ...says("Hi"), n: 2, logprobs: true, top_logprobs: 1 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  for (const choice of answer.choices) {
    const bytes = choice.logprobs.content.flatMap((one) => one.bytes);
    assert.equal(Buffer.from(bytes).toString("utf-8"), hello);
  }
});

test("the form of an answer is checked afterwards", async () => {
  const form = { response_format: { type: "json_object" } };
  const whole = await client.chat.completions.create({ ...says("Sort, as JSON"), ...form });
  assert.deepEqual(JSON.parse(whole.choices[0].message.content), { sorted: [1, 2, 3] });
  assert.equal(whole.expertctl.validation_passed, true);
  const cut = await client.chat.completions.create({ ...says("Sort, broken"), ...form });
  assert.equal(cut.expertctl.validation_passed, false);
});

test("completions and models", async () => {
  const answer = await client.completions.create({ model: "tiny", prompt: "[hello]", temperature: 0 });
  assert.equal(answer.choices[0].text, hello);
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, ["tiny", "auto", "acme/sql"]);
  assert.equal((await client.models.retrieve("acme/sql")).id, "acme/sql");
});

test("what is refused raises the class of the client", async () => {
  await assert.rejects(client.chat.completions.create({ ...says("Hi"), temperature: 9 }), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...says("Hi"), model: "gpt-5" }), NotFoundError);
  const stranger = new OpenAI({ apiKey: "wrong", baseURL, maxRetries: 0 });
  await assert.rejects(stranger.models.list(), AuthenticationError);
});

test("who waits no longer is told so, and the server goes on", async () => {
  const long = { ...says("Say it forever"), max_tokens: 16000 };
  await assert.rejects(client.chat.completions.create(long, { timeout: 500 }), APIConnectionTimeoutError);
  const leaving = new AbortController();
  const stream = await client.chat.completions.create({ ...long, stream: true }, { signal: leaving.signal });
  let read = 0;
  try {
    for await (const _ of stream) if (++read === 3) leaving.abort();
  } catch (error) {
    assert.ok(error instanceof APIUserAbortError);
  }
  assert.equal(read, 3);
  const answer = await client.chat.completions.create(says("Hi"));
  assert.equal(answer.choices[0].message.content, hello);
});
