/** What the surroundings of a program say: the variables of Node. A web page has none. */

/** The value of a variable; an empty one counts as none. */
export function variable(name: string): string | undefined {
  const process = Reflect.get(globalThis, "process") as Surroundings | undefined;
  return process?.env?.[name] || undefined;
}

interface Surroundings {
  readonly env?: Readonly<Record<string, string | undefined>>;
}
