import assert from "node:assert/strict";
import { afterEach, describe, it } from "node:test";

import {
  ExpertClient,
  ExpertError,
  ForbiddenError,
  NotFoundError,
  RateLimitError,
  RegistryError,
  SilenceError,
  UnreachableError,
  UsageError,
} from "../src/index.js";
import { secondsOf, waitAfter } from "../src/retries.js";
import { json, listen, nobody, refusal } from "./listening.js";

const KEY = "xpt_0123456789";
const NOW = "0";

/** The error that a promise ends in. */
async function failure(promise: Promise<unknown>): Promise<ExpertError> {
  try {
    await promise;
  } catch (error) {
    assert.ok(error instanceof ExpertError, String(error));
    return error;
  }
  throw new assert.AssertionError({ message: "no error came" });
}

describe("a request", () => {
  it("says who asks, and what is sent", async () => {
    await using server = await listen(json(200, { text: "3" }));
    const client = new ExpertClient({ baseUrl: `${server.url}/deep/`, apiKey: KEY });
    const result = await client.infer({ prompt: "1 + 2" });
    assert.equal(result.text, "3");
    const [asked] = server.asked;
    assert.equal(asked?.url, "/deep/v1/infer");
    assert.equal(asked?.headers.authorization, `Bearer ${KEY}`);
    assert.equal(asked?.headers["content-type"], "application/json");
  });

  it("has no Authorization without a key", async () => {
    await using server = await listen(json(200, { data: [] }));
    await new ExpertClient({ baseUrl: server.url }).models();
    assert.equal(server.asked[0]?.headers.authorization, undefined);
  });

  it("is sent with the fetch that was given", async () => {
    const seen: string[] = [];
    const fetch: typeof globalThis.fetch = async (input) => {
      seen.push(String(input));
      return new Response('{"data": []}', { headers: { "content-type": "application/json" } });
    };
    assert.deepEqual(await new ExpertClient({ fetch }).models(), []);
    assert.deepEqual(seen, ["http://127.0.0.1:8000/v1/models"]);
  });
});

describe("the key", () => {
  for (const status of [301, 302, 303, 307, 308]) {
    it(`does not follow a redirect ${status}, to wherever it leads`, async () => {
      await using elsewhere = await listen(json(200, { text: "got you" }));
      const location = `${elsewhere.url}/v1/infer`;
      await using server = await listen(json(status, {}, { location }));
      const client = new ExpertClient({ baseUrl: server.url, apiKey: KEY });
      const error = await failure(client.infer({ prompt: "?" }));
      assert.ok(error instanceof UnreachableError);
      assert.match(error.message, new RegExp(location));
      assert.equal(elsewhere.asked.length, 0);
      assert.equal(server.asked.length, 1);
    });
  }

  it("is not shown by the client or by an error", async () => {
    const client = new ExpertClient({ apiKey: KEY, baseUrl: "http://127.0.0.1:1", retries: 0 });
    const { inspect } = await import("node:util");
    const error = await failure(client.models());
    for (const shown of [inspect(client, { depth: 9, showHidden: true }), inspect(error), JSON.stringify(client)])
      assert.ok(!shown.includes(KEY), shown);
  });

  for (const key of ["", "with space", "line\nend", "Schlüssel"]) {
    it(`is refused as ${JSON.stringify(key)}, and not repeated`, () => {
      assert.throws(() => new ExpertClient({ apiKey: key }), (error: unknown) => {
        assert.ok(error instanceof UsageError);
        return key === "" || !error.message.includes(key);
      });
    });
  }
});

describe("the environment", () => {
  const names = ["EXPERT_SERVER", "EXPERT_API_KEY"] as const;
  afterEach(() => {
    for (const name of names) delete process.env[name];
  });

  it("names the server, and the key for it", async () => {
    await using server = await listen(json(200, { data: [] }));
    [process.env["EXPERT_SERVER"], process.env["EXPERT_API_KEY"]] = [`${server.url}/deep`, KEY];
    await new ExpertClient().models();
    await new ExpertClient({ baseUrl: server.url }).models();
    await new ExpertClient({ apiKey: "another" }).models();
    assert.deepEqual(
      server.asked.map(({ url, headers }) => [url, headers.authorization]),
      [
        ["/deep/v1/models", `Bearer ${KEY}`],
        ["/v1/models", `Bearer ${KEY}`],
        ["/deep/v1/models", "Bearer another"],
      ],
    );
  });

  it("has no key for any other server", async () => {
    await using server = await listen(json(200, { data: [] }));
    process.env["EXPERT_API_KEY"] = KEY;
    await new ExpertClient({ baseUrl: server.url }).models();
    process.env["EXPERT_SERVER"] = server.url.replace("127.0.0.1", "localhost");
    await new ExpertClient({ baseUrl: server.url }).models();
    assert.deepEqual(server.asked.map(({ headers }) => headers.authorization), [undefined, undefined]);
  });

  it("that is empty says nothing, and one that is wrong is refused", () => {
    [process.env["EXPERT_SERVER"], process.env["EXPERT_API_KEY"]] = ["", ""];
    new ExpertClient();
    process.env["EXPERT_SERVER"] = "localhost:8000";
    assert.throws(() => new ExpertClient(), UsageError);
  });
});

describe("settings that make no sense", () => {
  for (const baseUrl of ["", "localhost:8000", "ftp://127.0.0.1", "http://user:secret@127.0.0.1", "http://127.0.0.1/?a=b"]) {
    it(`are refused: baseUrl ${JSON.stringify(baseUrl)}`, () => {
      assert.throws(() => new ExpertClient({ baseUrl }), UsageError);
    });
  }
  for (const options of [{ timeoutMs: 0 }, { timeoutMs: -1 }, { timeoutMs: NaN }, { retries: -1 }, { retries: 1.5 }]) {
    it(`are refused: ${Object.entries(options).join()}`, () => {
      assert.throws(() => new ExpertClient(options), UsageError);
    });
  }
});

describe("an error of the server", () => {
  it("has its class, code, message, hint, status and request id", async () => {
    await using server = await listen(refusal(404, "not_found", { "x-request-id": "req_1" }));
    const error = await failure(new ExpertClient({ baseUrl: server.url }).jobs.get("none"));
    assert.ok(error instanceof NotFoundError);
    assert.equal(error.name, "NotFoundError");
    assert.deepEqual(
      [error.code, error.message, error.hint, error.status, error.requestId],
      ["not_found", "not_found it is", "mend it", 404, "req_1"],
    );
  });

  it("with a code of a later version keeps the code, in the class of its status", async () => {
    await using server = await listen(refusal(403, "on_holiday"));
    const error = await failure(new ExpertClient({ baseUrl: server.url }).models());
    assert.ok(error instanceof ForbiddenError);
    assert.equal(error.code, "on_holiday");
  });

  it("may be the page of a proxy", async () => {
    await using server = await listen((_, response) => response.writeHead(502).end("<h1>Bad Gateway</h1>"));
    const error = await failure(new ExpertClient({ baseUrl: server.url, retries: 0 }).models());
    assert.ok(error instanceof UnreachableError);
    assert.equal(error.status, 502);
    assert.equal(server.asked.length, 1);
  });

  it("that may pass is of the class of its status, and keeps its code", async () => {
    await using server = await listen(refusal(503, "store"), refusal(429, "budget"));
    const client = new ExpertClient({ baseUrl: server.url, retries: 0 });
    const [stored, limited] = [await failure(client.models()), await failure(client.models())];
    assert.ok(stored instanceof UnreachableError && !stored.sent && stored.code === "store");
    assert.ok(limited instanceof RateLimitError && limited.code === "budget");
  });

  it("of a status and a code that nobody knows is a RegistryError", async () => {
    await using server = await listen(refusal(507, "?"), refusal(418, "?"));
    const client = new ExpertClient({ baseUrl: server.url });
    assert.equal((await failure(client.models())).name, "BudgetError");
    assert.equal((await failure(client.models())).name, "RegistryError");
  });

  it("is shown in one line that is not too long, with nothing that a terminal obeys", async () => {
    const message = `\u001b[31mno\r\n\u202e${"x".repeat(2000)}`;
    await using server = await listen(json(400, { error: { code: "usage", message, hint: "a\u0007b" } }));
    const error = await failure(new ExpertClient({ baseUrl: server.url }).models());
    assert.match(error.message, /^\[31mno x{900,1000}…$/);
    assert.equal(error.hint, "a b");
  });

  it("keeps the joiners of emoji and of Persian words", async () => {
    const message = "\u{1F468}\u200D\u{1F469}\u200D\u{1F467} \u0645\u06CC\u200C\u062E\u0648\u0627\u0647\u0645";
    await using server = await listen(json(400, { error: { code: "usage", message, hint: "" } }));
    const error = await failure(new ExpertClient({ baseUrl: server.url }).models());
    assert.equal(error.message, message);
  });

  it("may be an answer that is no JSON", async () => {
    await using server = await listen((_, response) => response.end("hello"));
    const error = await failure(new ExpertClient({ baseUrl: server.url }).models());
    assert.ok(error instanceof RegistryError && !(error instanceof UnreachableError));
    assert.equal(server.asked.length, 1);
  });

  it("may be an answer without end", async () => {
    const piece = Buffer.alloc(1024 * 1024, " ");
    await using server = await listen((_, response) => {
      const more = (): void => {
        while (!response.destroyed && response.write(piece));
      };
      response.on("drain", more);
      more();
    });
    const error = await failure(new ExpertClient({ baseUrl: server.url }).models());
    assert.match(error.message, /67108864 bytes/);
    while (server.left() === 0) await new Promise((resolve) => setImmediate(resolve));
  });
});

describe("a request that is no JSON", () => {
  it("is refused before it is sent", async () => {
    await using server = await listen(json(200, {}));
    const metadata: Record<string, unknown> = {};
    metadata["self"] = metadata;
    const request = { prompt: "?", metadata: metadata as Record<string, string> };
    const error = await failure(new ExpertClient({ baseUrl: server.url }).infer(request));
    assert.ok(error instanceof UsageError);
    assert.equal(server.asked.length, 0);
  });
});

describe("a request that the server could not take", () => {
  for (const [status, code] of [[429, "rate_limit"], [503, "unreachable"]] as const) {
    it(`is sent again after ${status}`, async () => {
      const again = refusal(status, code, { "retry-after": NOW });
      await using server = await listen(again, again, json(200, { data: [] }));
      await new ExpertClient({ baseUrl: server.url, retries: 2 }).models();
      assert.equal(server.asked.length, 3);
    });
  }

  it("is not sent more often than said", async () => {
    await using server = await listen(refusal(429, "rate_limit", { "retry-after": NOW }));
    const error = await failure(new ExpertClient({ baseUrl: server.url, retries: 1 }).models());
    assert.ok(error instanceof RateLimitError);
    assert.equal(error.retryAfter, 0);
    assert.equal(server.asked.length, 2);
  });

  it("is not waited for longer than a minute", async () => {
    await using server = await listen(refusal(429, "rate_limit", { "retry-after": "3600" }));
    const error = await failure(new ExpertClient({ baseUrl: server.url }).models());
    assert.equal(error.retryAfter, 3600);
    assert.equal(server.asked.length, 1);
  });

  for (const status of [400, 401, 404, 409, 422, 500, 502, 504]) {
    it(`is not sent again after ${status}, which may have begun or never works`, async () => {
      await using server = await listen(refusal(status, "error"), json(200, { text: "" }));
      await failure(new ExpertClient({ baseUrl: server.url }).infer({ prompt: "?" }));
      assert.equal(server.asked.length, 1);
    });
  }

  it("is no silent server while it waits to be sent again", async () => {
    const again = refusal(429, "rate_limit", { "retry-after": "1" });
    await using server = await listen(again, json(200, { data: [] }));
    await new ExpertClient({ baseUrl: server.url, timeoutMs: 500 }).models();
    assert.equal(server.asked.length, 2);
  });

  it("is sent again after a silence or a break, unless it may have begun", async () => {
    const silent = (): void => undefined;
    const breaks = (_: unknown, response: { destroy(): unknown }): unknown => response.destroy();
    await using server = await listen(silent, breaks, json(200, { data: [] }));
    const client = new ExpertClient({ baseUrl: server.url, timeoutMs: 1000 });
    assert.deepEqual(await client.models(), []);
    assert.equal(server.asked.length, 3);
    await using other = await listen(breaks, json(200, {}));
    const error = await failure(new ExpertClient({ baseUrl: other.url }).infer({ prompt: "?" }));
    assert.ok(error instanceof UnreachableError && error.sent);
    assert.equal(other.asked.length, 1);
  });

  it("may be a prompt that never arrived, and is sent once the server is there", async () => {
    const [tried, nowhere]: [string[], string] = [[], await nobody()];
    const fetch: typeof globalThis.fetch = (input, init) => {
      tried.push(String(input));
      return globalThis.fetch(tried.length < 3 ? nowhere : input, init);
    };
    await using server = await listen(json(200, { text: "3" }));
    const result = await new ExpertClient({ baseUrl: server.url, fetch }).infer({ prompt: "1 + 2" });
    assert.equal(result.text, "3");
    assert.deepEqual([tried.length, server.asked.length], [3, 1]);
  });

  it("is left alone when the caller aborts after a silence", async () => {
    await using server = await listen(() => undefined);
    const client = new ExpertClient({ baseUrl: server.url, timeoutMs: 50 });
    const [controller, reason] = [new AbortController(), new Error("enough")];
    setTimeout(() => controller.abort(reason), 150);
    await assert.rejects(client.models({ signal: controller.signal }), reason);
    assert.equal(server.asked.length, 1);
  });

  it("is left alone when the caller aborts while it waits", async () => {
    await using server = await listen(refusal(429, "rate_limit", { "retry-after": "30" }));
    const client = new ExpertClient({ baseUrl: server.url });
    const [controller, reason] = [new AbortController(), new Error("enough")];
    const promise = client.models({ signal: controller.signal });
    setTimeout(() => controller.abort(reason), 50);
    await assert.rejects(promise, reason);
    assert.equal(server.asked.length, 1);
  });
});

describe("the time before the next try", () => {
  const passing = new UnreachableError("?", { sent: false });

  it("grows up to eight seconds, differs, and is never less than asked for", () => {
    for (let tries = 1; tries <= 20; tries += 1) {
      const own = Math.min(8000, 500 * 2 ** (tries - 1));
      const waits = Array.from({ length: 200 }, () => waitAfter(tries, passing, false) ?? 0);
      assert.ok(waits.every((wait) => wait >= own / 2 && wait <= own));
      assert.ok(new Set(waits).size > 100);
      const asked = new RateLimitError("?", { retryAfter: 60 });
      assert.ok((waitAfter(tries, asked, false) ?? 0) >= 60_000);
    }
  });

  it("is none where another one is of no use", () => {
    assert.equal(waitAfter(1, new RateLimitError("?", { retryAfter: 61 }), true), undefined);
    assert.equal(waitAfter(1, new UnreachableError("?"), false), undefined);
    assert.notEqual(waitAfter(1, new UnreachableError("?"), true), undefined);
    assert.equal(waitAfter(1, new UsageError("?"), true), undefined);
    assert.equal(waitAfter(1, new Error("?"), true), undefined);
  });

  it("is read from a Retry-After in seconds; a date needs a right clock", () => {
    assert.equal(secondsOf("12"), 12);
    assert.equal(secondsOf(" 7 "), 7);
    for (const text of ["Thu, 01 Jan 2026 00:00:30 GMT", "soon", "-1", "9".repeat(20), null])
      assert.equal(secondsOf(text), undefined);
  });
});

describe("a server that is not there", () => {
  it("gives an error that says so", async () => {
    const error = await failure(new ExpertClient({ baseUrl: await nobody(), retries: 0 }).models());
    assert.ok(error instanceof UnreachableError && !error.sent);
    assert.match(error.hint, /expertctl serve/);
  });

  it("is given up when it is silent", async () => {
    await using server = await listen(() => undefined);
    const client = new ExpertClient({ baseUrl: server.url, timeoutMs: 50 });
    assert.ok((await failure(client.infer({ prompt: "?" }))) instanceof SilenceError);
  });

  it("is given up even by a fetch that looks at no signal", async () => {
    const deaf = (): Promise<Response> => new Promise(() => undefined);
    const client = new ExpertClient({ baseUrl: "http://127.0.0.1:9", fetch: deaf, timeoutMs: 50, retries: 0 });
    assert.ok((await failure(client.infer({ prompt: "?" }))) instanceof SilenceError);
  });

  it("is not given up for an answer that comes slowly, as long as it comes", async () => {
    const letters = [...'{"data": []}'];
    await using server = await listen((_, response) => {
      const timer = setInterval(() => {
        response.write(letters.shift());
        if (letters.length > 0) return;
        clearInterval(timer);
        response.end();
      }, 50);
    });
    assert.deepEqual(await new ExpertClient({ baseUrl: server.url, timeoutMs: 400 }).models(), []);
  });

  it("is given up when it breaks off in its answer", async () => {
    await using server = await listen((_, response) => {
      response.writeHead(200, { "content-length": "100" });
      response.write("{");
      setTimeout(() => response.destroy(), 20);
    });
    const client = new ExpertClient({ baseUrl: server.url, retries: 0 });
    assert.ok((await failure(client.models())) instanceof UnreachableError);
  });
});

describe("a caller who aborts", () => {
  it("gets the reason of the signal, and the connection ends", async () => {
    await using server = await listen(() => controller.abort(reason));
    const [controller, reason] = [new AbortController(), new Error("changed my mind")];
    const client = new ExpertClient({ baseUrl: server.url });
    await assert.rejects(client.infer({ prompt: "?" }, { signal: controller.signal }), reason);
    while (server.left() === 0) await new Promise((resolve) => setImmediate(resolve));
  });

  it("asks nothing when the signal was aborted before", async () => {
    await using server = await listen(json(200, {}));
    const client = new ExpertClient({ baseUrl: server.url });
    await assert.rejects(client.models({ signal: AbortSignal.abort(new Error("no")) }), /no/);
    assert.equal(server.asked.length, 0);
  });
});
