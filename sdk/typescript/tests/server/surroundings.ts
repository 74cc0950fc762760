/** The server that these tests are run against, and what is installed there; pytest says so. */

function given(name: string): string {
  const value = process.env[name];
  if (value === undefined) throw new Error(`${name} is not set: run tests/sdk/test_typescript.py`);
  return value;
}

export const URL_OF_SERVER = given("EXPERT_TEST_URL");
/** An API key of it. */
export const KEY = given("EXPERT_TEST_KEY");
/** Another key. */
export const OTHER_KEY = given("EXPERT_TEST_OTHER_KEY");
/** A key that may ask ten times a minute. */
export const SLOW_KEY = given("EXPERT_TEST_SLOW_KEY");
/** The base. */
export const BASE = given("EXPERT_TEST_BASE");
/** Names of experts. */
export const EXPERTS: readonly string[] = given("EXPERT_TEST_EXPERTS").split(",");
