import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { ExpertClient, UsageError } from "../src/index.js";
import { json, listen } from "./listening.js";

const MOMENT = "2026-01-01T00:00:00.000Z";

function job(status: string, endedAt: string | null = null): Record<string, unknown> {
  return { job_id: "a/b", status, submitted_at: MOMENT, ended_at: endedAt, text: "" };
}

describe("a job", () => {
  it("is waited for until it is at its end", async () => {
    const looks = [job("queued"), job("processing"), job("cancelled"), job("cancelled", MOMENT)];
    await using server = await listen(...looks.map((look) => json(200, look)));
    const { jobs } = new ExpertClient({ baseUrl: server.url });
    const ended = await jobs.wait("a/b", { pollMs: 1 });
    assert.deepEqual([ended.status, ended.endedAt], ["cancelled", MOMENT]);
    assert.equal(server.asked.length, 4);
  });

  it("is named in the path by its id, whatever that is", async () => {
    await using server = await listen(json(200, job("cancelled")));
    await new ExpertClient({ baseUrl: server.url }).jobs.cancel("../x?y");
    assert.equal(server.asked[0]?.method, "DELETE");
    assert.equal(server.asked[0]?.url, "/v1/jobs/..%2Fx%3Fy");
  });

  it("is waited for no longer once the signal is aborted", async () => {
    await using server = await listen(json(200, job("processing")));
    const { jobs } = new ExpertClient({ baseUrl: server.url });
    const reason = new Error("enough");
    const controller = new AbortController();
    setTimeout(() => controller.abort(reason), 80);
    await assert.rejects(jobs.wait("1", { signal: controller.signal, pollMs: 10_000 }), reason);
  });

  it("is not looked at all the time", async () => {
    await assert.rejects(new ExpertClient().jobs.wait("1", { pollMs: 0 }), UsageError);
  });

  for (const jobId of ["", ".", ".."]) {
    it(`has no id ${JSON.stringify(jobId)}, which would be another address`, async () => {
      await assert.rejects(new ExpertClient().jobs.get(jobId), UsageError);
    });
  }
});
