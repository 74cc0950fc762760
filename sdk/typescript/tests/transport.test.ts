import assert from "node:assert/strict";
import { describe, it } from "node:test";

import {
  ExpertClient,
  ExpertError,
  ForbiddenError,
  NotFoundError,
  RateLimitError,
  SilenceError,
  UnreachableError,
  UsageError,
} from "../src/index.js";
import { secondsOf, waitBeforeNext } from "../src/transport.js";
import { json, listen, refusal } from "./listening.js";

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
    const client = new ExpertClient({ apiKey: KEY, baseUrl: "http://127.0.0.1:1" });
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
    const error = await failure(new ExpertClient({ baseUrl: server.url }).models());
    assert.ok(error instanceof UnreachableError);
    assert.equal(error.status, 502);
    assert.equal(server.asked.length, 1);
  });

  it("may be an answer that is no JSON", async () => {
    await using server = await listen((_, response) => response.end("hello"));
    assert.ok((await failure(new ExpertClient({ baseUrl: server.url }).models())) instanceof UnreachableError);
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
  it("grows, differs, and is never less than asked for", () => {
    for (let tries = 0; tries < 4; tries += 1) {
      const own = 500 * 2 ** tries;
      const waits = Array.from({ length: 200 }, () => waitBeforeNext(tries, undefined));
      assert.ok(waits.every((wait) => wait >= own / 2 && wait <= own));
      assert.ok(new Set(waits).size > 100);
      assert.ok(waitBeforeNext(tries, 7) >= 7000);
    }
  });

  it("is read from a Retry-After in both its forms", () => {
    const now = Date.parse("2026-01-01T00:00:00Z");
    assert.equal(secondsOf("12", now), 12);
    assert.equal(secondsOf("Thu, 01 Jan 2026 00:00:30 GMT", now), 30);
    assert.equal(secondsOf("Wed, 31 Dec 2025 23:59:00 GMT", now), 0);
    assert.equal(secondsOf("soon", now), undefined);
    assert.equal(secondsOf(null, now), undefined);
  });
});

describe("a server that is not there", () => {
  it("gives an error that says so", async () => {
    const error = await failure(new ExpertClient({ baseUrl: "http://127.0.0.1:1" }).models());
    assert.ok(error instanceof UnreachableError);
    assert.match(error.hint, /expertctl serve/);
  });

  it("is given up when it is silent", async () => {
    await using server = await listen(() => undefined);
    const client = new ExpertClient({ baseUrl: server.url, timeoutMs: 50 });
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
    assert.ok((await failure(new ExpertClient({ baseUrl: server.url }).models())) instanceof UnreachableError);
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
