/** The body of an answer, read piece by piece: each must come before the silence is too long. */

import { RegistryError } from "./errors.js";
import type { Watch } from "./watch.js";

/** More bytes than this are no answer of ours. */
const MAX_BYTES = 64 * 1024 * 1024;

/** The bytes of a body in the pieces in which they come; leaving them cancels it. */
export async function* piecesOf(
  body: ReadableStream<Uint8Array>,
  watch: Watch,
): AsyncGenerator<Uint8Array, void> {
  const reader = body.getReader();
  const next = (): ReturnType<typeof reader.read> => watch.during(reader.read());
  try {
    for (let read = await next(); !read.done; read = await next()) yield read.value;
  } finally {
    await reader.cancel().catch(() => undefined); // an error that broke the body is thrown already
  }
}

/** The text of a whole body. */
export async function textOf(response: Response, watch: Watch): Promise<string> {
  if (response.body === null) return "";
  const decoder = new TextDecoder();
  let [text, bytes] = ["", 0];
  for await (const piece of piecesOf(response.body, watch)) {
    bytes += piece.length;
    if (bytes > MAX_BYTES) throw new RegistryError(`the answer has over ${MAX_BYTES} bytes`);
    text += decoder.decode(piece, { stream: true });
  }
  return text + decoder.decode();
}
