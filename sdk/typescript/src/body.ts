/** The body of an answer, read piece by piece: each must come before the silence is too long. */

import type { Watch } from "./watch.js";

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
  let text = "";
  for await (const piece of piecesOf(response.body, watch))
    text += decoder.decode(piece, { stream: true });
  return text + decoder.decode();
}
