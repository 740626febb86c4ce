// Replays a run without changing the document: the same prompt with the settings and the seed of its receipt.
// receipt-facts.js compares the texts.

import { compared, typedOf } from "./receipt-facts.js";

/**
 * What compared() says of the run once it has come again. `run` is { prompt, text, index, typed, receipt };
 * `complete(prompt, typed, signal)` and what it throws: see completion.js.
 */
export async function replay(run, { complete, parameters, signal }) {
  // What a receipt has only a digest of (a source, a suffix) is as it was typed.
  const typed = { ...run.typed, ...typedOf(run.receipt, parameters) };
  let [text, receipt] = ["", null];
  for await (const { type, data } of complete(run.prompt, typed, signal)) {
    if (type === "token" && (data.index ?? 0) === run.index) text += data.text;
    if (type === "done") receipt = data.receipt;
  }
  return compared(run, { text: text.replace(/\r\n?/g, "\n"), receipt }); // line ends as in the document
}
