import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { ExpertClient, UsageError } from "../src/index.js";
import { json, listen } from "./listening.js";

function job(status: string): Record<string, unknown> {
  return { job_id: "a/b", status, submitted_at: "2026-01-01T00:00:00.000Z", text: "" };
}

describe("a job", () => {
  it("is waited for until it is at its end", async () => {
    const answers = ["queued", "processing", "finished"].map((status) => json(200, job(status)));
    await using server = await listen(...answers);
    const { jobs } = new ExpertClient({ baseUrl: server.url });
    const ended = await jobs.wait("a/b", { pollMs: 1 });
    assert.equal(ended.status, "finished");
    assert.equal(server.asked.length, 3);
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

  for (const jobId of ["", ".", ".."]) {
    it(`has no id ${JSON.stringify(jobId)}, which would be another address`, async () => {
      await assert.rejects(new ExpertClient().jobs.get(jobId), UsageError);
    });
  }
});
