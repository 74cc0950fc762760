/** Servers that do what a real one cannot be told to do: refuse, send elsewhere, break off, be slow. */

import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

/** One server, what it was asked, and its address. */
export interface Listening extends AsyncDisposable {
  readonly url: string;
  readonly asked: IncomingMessage[];
  /** How many connections broke before their answer was whole. */
  readonly left: () => number;
}

type Answer = (request: IncomingMessage, response: ServerResponse) => void;

/** Listen, and answer with these in order, the last one again and again. */
export async function listen(...answers: Answer[]): Promise<Listening> {
  const asked: IncomingMessage[] = [];
  let left = 0;
  const server = createServer((request, response) => {
    const answer = answers[Math.min(asked.length, answers.length - 1)];
    asked.push(request);
    response.on("close", () => (left += response.writableFinished ? 0 : 1));
    request.resume().on("end", () => answer?.(request, response));
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as AddressInfo;
  const close = async (): Promise<void> => {
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  };
  return { url: `http://127.0.0.1:${port}`, asked, left: () => left, [Symbol.asyncDispose]: close };
}

/** An address at which nobody listens any more. */
export async function nobody(): Promise<string> {
  await using server = await listen();
  return server.url;
}

/** Answer with a JSON document. */
export function json(status: number, document: unknown, headers: Record<string, string> = {}): Answer {
  return (_, response) => {
    response.writeHead(status, { "content-type": "application/json", ...headers });
    response.end(JSON.stringify(document));
  };
}

/** An error as the server writes it. */
export function refusal(status: number, code: string, headers: Record<string, string> = {}): Answer {
  return json(status, { error: { code, message: `${code} it is`, hint: "mend it" } }, headers);
}

/** Send a stream of events, and then end, break off or wait for ever. */
export function events(text: string, then: "end" | "break" | "wait"): Answer {
  return (_, response) => {
    response.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
    response.write(text);
    if (then === "end") response.end();
    if (then === "break") setTimeout(() => response.destroy(), 20);
  };
}
