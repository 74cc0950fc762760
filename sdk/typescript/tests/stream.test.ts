import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { BudgetError, ExpertClient, NoAnswerError, SilenceError, UnreachableError } from "../src/index.js";
import { events, json, listen, refusal } from "./listening.js";

const STARTED = 'event: started\ndata: {"job_id": "1", "tokens": {"prompt": 3, "reused": 2}}\n\n';
const PIECES = 'event: piece\ndata: {"text": "Hel"}\n\n: keep-alive\n\nevent: piece\ndata: {"text": "lo"}\n\n';
const FINISHED = 'event: finished\ndata: {"text": "Hello", "tokens_generated": 2}\n\n';
const FAILED = 'event: failed\ndata: {"error": {"code": "budget", "message": "too much", "hint": "less"}}\n\n';
const QUESTION = { prompt: "?" };

async function turn(): Promise<void> {
  await new Promise((resolve) => setImmediate(resolve));
}

describe("a stream", () => {
  it("gives what begins it, its pieces and the whole answer", async () => {
    await using server = await listen(events(STARTED + PIECES + FINISHED, "end"));
    const chunks = [];
    for await (const chunk of new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION)) chunks.push(chunk);
    assert.deepEqual(chunks, [
      { text: "", started: { jobId: "1", tokens: { prompt: 3, reused: 2 } } },
      { text: "Hel" },
      { text: "lo" },
      { text: "", result: { text: "Hello", tokensGenerated: 2 } },
    ]);
  });

  it("can be read for its result alone", async () => {
    await using server = await listen(events(PIECES + FINISHED, "end"));
    const result = await new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION).result();
    assert.equal(result.text, "Hello");
  });

  it("is asked for when it is read, not before", async () => {
    await using server = await listen(events(FINISHED, "end"));
    const stream = new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION);
    await turn();
    assert.equal(server.asked.length, 0);
    await stream.result();
    assert.equal(server.asked.length, 1);
  });

  it("ends its connection when the loop is left", async () => {
    await using server = await listen(events(PIECES, "wait"));
    for await (const chunk of new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION)) {
      assert.equal(chunk.text, "Hel");
      break;
    }
    while (server.left() === 0) await turn();
  });

  it("ends its connection when it is left while nothing comes", async () => {
    await using server = await listen(events(STARTED, "wait"));
    const stream = new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION);
    await stream.next();
    const waiting = stream.next();
    await turn();
    const left = stream.return();
    await assert.rejects(waiting, { name: "AbortError" });
    assert.deepEqual(await left, { value: undefined, done: true });
    while (server.left() === 0) await turn();
    await assert.rejects(stream.result(), NoAnswerError);
  });

  it("throws the reason of a signal that is aborted, and ends its connection", async () => {
    await using server = await listen(events(PIECES, "wait"));
    const [controller, reason] = [new AbortController(), new Error("enough")];
    const client = new ExpertClient({ baseUrl: server.url });
    const stream = client.inferStream(QUESTION, { signal: controller.signal });
    await stream.next();
    await stream.next();
    setTimeout(() => controller.abort(reason), 20);
    await assert.rejects(stream.next(), reason);
    while (server.left() === 0) await turn();
  });

  it("throws an error that comes before it as any other request does", async () => {
    await using server = await listen(refusal(422, "budget"));
    const stream = new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION);
    await assert.rejects(stream.next(), BudgetError);
  });

  it("is asked for again when the server could not take it", async () => {
    const again = refusal(503, "unreachable", { "retry-after": "0" });
    await using server = await listen(again, events(FINISHED, "end"));
    await new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION).result();
    assert.equal(server.asked.length, 2);
  });

  for (const name of ["failed", "error"]) {
    it(`throws the error of an event ${name}, after the text before it`, async () => {
      await using server = await listen(events(PIECES + FAILED.replace("failed", name), "end"));
      const stream = new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION);
      const texts: string[] = [];
      const read = async (): Promise<void> => {
        for await (const { text } of stream) texts.push(text);
      };
      await assert.rejects(read(), (error) => error instanceof BudgetError && error.hint === "less");
      assert.deepEqual(texts, ["Hel", "lo"]);
    });
  }

  for (const then of ["end", "break"] as const) {
    it(`is no whole answer when the connection does ${then} before the last event`, async () => {
      await using server = await listen(events(PIECES, then));
      const stream = new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION);
      await assert.rejects(stream.result(), UnreachableError);
    });
  }

  it("is given up after a silence, for which a comment is enough of a sign", async () => {
    await using server = await listen((_, response) => {
      response.writeHead(200, { "content-type": "text/event-stream" });
      let signs = 0;
      const timer = setInterval(() => {
        response.write(signs++ < 8 ? ": keep-alive\n\n" : FINISHED);
        if (signs > 8) clearInterval(timer);
      }, 50);
    }, events(PIECES, "wait"));
    const client = new ExpertClient({ baseUrl: server.url, timeoutMs: 300 });
    assert.equal((await client.inferStream(QUESTION).result()).text, "Hello");
    await assert.rejects(client.inferStream(QUESTION).result(), SilenceError);
  });

  it("is not given up while its reader is at work on a piece", async () => {
    await using server = await listen((_, response) => {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.write(PIECES);
      setTimeout(() => response.end(FINISHED), 400);
    });
    const client = new ExpertClient({ baseUrl: server.url, timeoutMs: 200 });
    const stream = client.inferStream(QUESTION);
    for await (const { text } of stream)
      if (text === "lo") await new Promise((resolve) => setTimeout(resolve, 500));
    assert.equal((await stream.result()).text, "Hello");
  });

  it("passes over events that it does not know", async () => {
    await using server = await listen(events(`event: weather\ndata: fine\n\n${FINISHED}`, "end"));
    await new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION).result();
  });

  it("refuses an answer that is none", async () => {
    await using server = await listen(json(200, { text: "Hello" }), events("event: piece\ndata: {\n\n", "end"));
    const client = new ExpertClient({ baseUrl: server.url });
    await assert.rejects(client.inferStream(QUESTION).result(), /no stream of events/);
    await assert.rejects(client.inferStream(QUESTION).result(), /not JSON/);
  });

  for (const name of ["started", "piece", "finished", "failed"])
    it(`refuses an event ${name} that is no object`, async () => {
      await using server = await listen(events(`event: ${name}\ndata: null\n\n`, "end"));
      const reading = new ExpertClient({ baseUrl: server.url }).inferStream(QUESTION).result();
      await assert.rejects(reading, new RegExp(`the event ${name} is no object`));
    });
});
