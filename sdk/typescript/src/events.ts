/**
 * Server-sent events, read from bytes in whatever pieces they arrive.
 *
 * The rules are those of the HTML standard, "9.2.6 Interpreting an event stream": lines end in LF,
 * CR or CRLF, a comment begins with a colon, lines of data are joined by LF, an event without data
 * is none, and one that the end of the stream cuts off is none either.
 */

import { UnreachableError } from "./errors.js";

/** One event: its name, "message" where it has none, and its data. */
export interface ServerEvent {
  readonly name: string;
  readonly data: string;
}

/** More characters than this in one event are no answer of ours. */
const MAX_CHARACTERS = 64 * 1024 * 1024;

const LINE_END = /\r\n|\r|\n/g;

/** Reads one stream; pieces are pushed in order. */
export class EventParser {
  readonly #decoder = new TextDecoder();
  #line = "";
  #data: string[] = [];
  #name = "";
  #held = 0;
  #endedInReturn = false;

  /** Take the next bytes and give the events that they complete. */
  push(bytes: Uint8Array): ServerEvent[] {
    let text = this.#decoder.decode(bytes, { stream: true });
    if (text === "") return [];
    if (this.#endedInReturn && text.startsWith("\n")) text = text.slice(1);
    this.#endedInReturn = text.endsWith("\r");
    this.#count(text.length);
    return this.#lines(text);
  }

  /** A line end is looked for in what is new only, so that a long line is not read again. */
  #lines(text: string): ServerEvent[] {
    const events: ServerEvent[] = [];
    let from = 0;
    for (const end of text.matchAll(LINE_END)) {
      const event = this.#take(this.#line + text.slice(from, end.index));
      if (event !== undefined) events.push(event);
      this.#line = "";
      from = end.index + end[0].length;
    }
    this.#line += text.slice(from);
    return events;
  }

  #take(line: string): ServerEvent | undefined {
    if (line === "") return this.#end();
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const rest = colon < 0 ? "" : line.slice(colon + 1);
    const value = rest.startsWith(" ") ? rest.slice(1) : rest;
    if (field === "data") this.#data.push(value);
    if (field === "event") this.#name = value;
    return undefined;
  }

  #end(): ServerEvent | undefined {
    const [data, name] = [this.#data, this.#name];
    this.#data = [];
    this.#name = "";
    this.#held = 0;
    return data.length === 0 ? undefined : { name: name || "message", data: data.join("\n") };
  }

  #count(characters: number): void {
    this.#held += characters;
    if (this.#held > MAX_CHARACTERS) throw new UnreachableError("an event of the stream has no end");
  }
}

/** The events of a body that comes in these pieces. */
export async function* eventsOf(pieces: AsyncIterable<Uint8Array>): AsyncGenerator<ServerEvent, void> {
  const parser = new EventParser();
  for await (const piece of pieces) yield* parser.push(piece);
}
