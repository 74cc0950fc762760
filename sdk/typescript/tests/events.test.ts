import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { piecesOf } from "../src/body.js";
import { EventParser, eventsOf, type ServerEvent } from "../src/events.js";
import { Watch } from "../src/watch.js";

const encoder = new TextEncoder();

/** What a parser makes of a text that comes in pieces of so many bytes. */
function parsed(text: string | Uint8Array, size = Infinity): ServerEvent[] {
  const bytes = typeof text === "string" ? encoder.encode(text) : text;
  const parser = new EventParser();
  const events: ServerEvent[] = [];
  const step = Math.min(size, Math.max(1, bytes.length));
  for (let from = 0; from < bytes.length; from += step)
    events.push(...parser.push(bytes.slice(from, from + step)));
  return events;
}

function message(data: string): ServerEvent {
  return { name: "message", data };
}

/** Streams and what the HTML standard says of them, its own examples among them. */
const CASES: [string, string, ServerEvent[]][] = [
  [
    "the standard's example of stock prices",
    "data: YHOO\ndata: +2\ndata: 10\n\n",
    [message("YHOO\n+2\n10")],
  ],
  [
    "the standard's example of four blocks",
    ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
    [message("first event"), message("second event"), message(" third event")],
  ],
  ["the standard's example of empty data", "data\n\ndata\ndata\n\ndata:", [message(""), message("\n")]],
  ["the standard's example of a space", "data:test\n\ndata: test\n\n", [message("test"), message("test")]],
  [
    "the standard's example of names",
    "event: add\ndata: 73857293\n\nevent: remove\ndata: 2153\n\n",
    [{ name: "add", data: "73857293" }, { name: "remove", data: "2153" }],
  ],
  ["lines that end in CRLF", "event: a\r\ndata: 1\r\n\r\ndata: 2\r\n\r\n", [{ name: "a", data: "1" }, message("2")]],
  ["lines that end in CR", "data: 1\rdata: 2\r\rdata: 3\r\r", [message("1\n2"), message("3")]],
  ["line ends of all kinds", "data: 1\r\ndata: 2\ndata: 3\r\r\ndata: 4\n\n", [message("1\n2\n3"), message("4")]],
  ["comments between the lines of one event", "data: 1\n: keep-alive\ndata: 2\n\n: bye\n\n", [message("1\n2")]],
  ["a field that nobody knows", "colour: red\nretry: 10\ndata: 1\n\n", [message("1")]],
  ["a name without data", "event: ping\n\ndata: 1\n\n", [message("1")]],
  ["an empty name", "event:\ndata: 1\n\n", [message("1")]],
  ["the last name counts", "event: a\nevent: b\ndata: 1\n\n", [{ name: "b", data: "1" }]],
  ["a mark of the byte order", "\uFEFFdata: 1\n\n", [message("1")]],
  ["a mark of the byte order within the data", "data: \uFEFF1\n\n", [message("\uFEFF1")]],
  ["colons in the data", 'data: {"a": "b:c"}\n\n', [message('{"a": "b:c"}')]],
  ["letters of two, three and four bytes", "data: é – 🧠 漢\n\n", [message("é – 🧠 漢")]],
  ["an event that the end cuts off", "data: 1\n\ndata: 2\n", [message("1")]],
  ["nothing", "", []],
];

describe("the parser of event streams", () => {
  for (const [what, text, events] of CASES) {
    it(`reads ${what}, whole and in pieces of any size`, () => {
      for (const size of [Infinity, 1, 2, 3, 5, 7]) assert.deepEqual(parsed(text, size), events);
    });
  }

  it("takes no notice of where a stream is cut in two", () => {
    const bytes = encoder.encode("event: é\r\ndata: 🧠\r\n\r\n: c\rdata: x\r\rdata: 漢\n\n");
    const whole = parsed(bytes);
    assert.equal(whole.length, 3);
    for (let cut = 0; cut <= bytes.length; cut += 1) {
      const parser = new EventParser();
      const events = [...parser.push(bytes.slice(0, cut)), ...parser.push(bytes.slice(cut))];
      assert.deepEqual(events, whole, `cut at ${cut}`);
    }
  });

  it("replaces bytes that are no UTF-8", () => {
    const bytes = new Uint8Array([...encoder.encode("data: a"), 0xff, ...encoder.encode("b\n\n")]);
    for (const size of [Infinity, 1]) assert.deepEqual(parsed(bytes, size), [message("a\uFFFDb")]);
  });

  it("gives an event as soon as its empty line is there", () => {
    const parser = new EventParser();
    assert.deepEqual(parser.push(encoder.encode("data: 1\n\r")), [message("1")]);
    assert.deepEqual(parser.push(encoder.encode("\ndata: 2\n\n")), [message("2")]);
  });

  it("reads a long line in time that grows with its length alone", () => {
    const piece = encoder.encode("x".repeat(1024));
    const parser = new EventParser();
    parser.push(encoder.encode("data: "));
    for (let count = 0; count < 16 * 1024; count += 1) parser.push(piece);
    const [event] = parser.push(encoder.encode("\n\n"));
    assert.equal(event?.data.length, 16 * 1024 * 1024);
  });

  it("refuses an event without end", () => {
    const piece = encoder.encode("x".repeat(1024 * 1024));
    const parser = new EventParser();
    const flood = (): void => {
      for (let count = 0; count < 65; count += 1) parser.push(piece);
    };
    assert.throws(flood, /no end/);
  });
});

describe("the events of a body", () => {
  it("come one by one, and leaving them cancels the body", async () => {
    let isCancelled = false;
    const body = new ReadableStream<Uint8Array>({
      pull: (controller) => controller.enqueue(encoder.encode("data: 1\n\n")),
      cancel: () => {
        isCancelled = true;
      },
    });
    for await (const event of eventsOf(piecesOf(body, new Watch(undefined, 60_000)))) {
      assert.deepEqual(event, message("1"));
      break;
    }
    assert.ok(isCancelled);
  });
});
