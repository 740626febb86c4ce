// The page's requests to the server about tokens.

import { ask } from "../request/completion.js";

export function tokenize(prompt, signal) {
  return ask("tokenize", { prompt }, signal);
}

export function score(ids, logprobs, signal) {
  return ask("score", { prompt: ids, logprobs }, signal);
}

/** The most likely next token, with all alternatives that the server tells; null where it generates none. */
export async function nextToken(prompt, signal, { source, truncate_prompt_tokens: most }) {
  const fields = { ...(source && { source }), ...(most && { truncate_prompt_tokens: Number(most) }) };
  const body = { prompt, max_tokens: 1, logprobs: 20, stream: false, temperature: 0, ...fields };
  return (await ask("complete", body, signal)).choices[0].tokens[0] ?? null;
}
