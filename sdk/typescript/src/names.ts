/**
 * The one place where names change: camelCase here, snake_case on the wire.
 *
 * Every field follows the same rule, and the types follow it too, so a field that the server gains
 * needs no entry here. What belongs to the user keeps its keys: see `UserData`.
 */

/** Fields whose content is the user's: passed on as it is, in both directions. */
export type UserData = "metadata" | "schema";

const USER_DATA: ReadonlySet<string> = new Set<UserData>(["metadata", "schema"]);

/** `maxTokens` → `max_tokens`. */
export type SnakeName<S extends string> = S extends `${infer Head}${infer Tail}`
  ? Head extends Lowercase<Head>
    ? `${Head}${SnakeName<Tail>}`
    : `_${Lowercase<Head>}${SnakeName<Tail>}`
  : S;

/** A value of ours, as it is on the wire. */
export type Wire<T> = T extends readonly (infer Item)[]
  ? Wire<Item>[]
  : T extends object
    ? { [K in keyof T as K extends string ? SnakeName<K> : K]: K extends UserData ? T[K] : Wire<T[K]> }
    : T;

/** `maxTokens` → `max_tokens`. */
export function snakeName<S extends string>(name: S): SnakeName<S> {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`) as SnakeName<S>;
}

/** `max_tokens` → `maxTokens`. */
export function camelName(name: string): string {
  return name.replace(/(?<=[a-z0-9])_([a-z])/g, (_, letter: string) => letter.toUpperCase());
}

/** Write a value as the server reads it; a field that is undefined is left out. */
export function toWire<T>(value: T): Wire<T> {
  return renamed(value, snakeName) as Wire<T>;
}

/** Read a value as the server wrote it; its type is the caller's word. */
export function fromWire<T>(value: unknown): T {
  return renamed(value, camelName) as T;
}

function renamed(value: unknown, name: (key: string) => string): unknown {
  if (Array.isArray(value)) return value.map((item) => renamed(item, name));
  if (typeof value !== "object" || value === null) return value;
  const given = Object.entries(value).filter(([, item]) => item !== undefined);
  return Object.fromEntries(
    given.map(([key, item]) => [name(key), USER_DATA.has(key) ? item : renamed(item, name)]),
  );
}
