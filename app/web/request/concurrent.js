// Several runs of one prompt as one: their events with the index of the run that each is of. Pure.

import { CompletionError } from "./completion.js";

/**
 * `streams`: what complete() gives, one for each run. Yields the first run's start, each run's tokens with `index`, and a
 * `done` that has the choices and receipts of all. A run that fails ends alone: the message is its finish reason. Throws
 * the error of the first one if all fail, and whatever is not a CompletionError.
 */
export async function* concurrently(streams) {
  const iterators = streams.map((stream) => stream[Symbol.asyncIterator]());
  const waiting = new Map(iterators.map((iterator, index) => [index, next(iterator, index)]));
  const [choices, receipts, errors] = [[], [], []];
  let hasStarted = false;
  let tokens = 0;
  try {
    while (waiting.size) {
      const { index, done, value, error } = await Promise.race(waiting.values());
      if (error && !(error instanceof CompletionError)) throw error;
      if (error) [errors[index], choices[index]] = [error, { index, finish_reason: `failed: ${error.message}` }];
      if (done || error) waiting.delete(index);
      else waiting.set(index, next(iterators[index], index));
      if (!value) continue;
      const { type, data } = value;
      if (type === "token") yield { type, data: { ...data, index } };
      else if (type === "done") {
        choices[index] = { ...data.choices[0], index };
        receipts[index] = data.receipt;
        tokens += data.usage?.completion_tokens ?? 0;
      } else if (type !== "start" || !hasStarted) yield value;
      hasStarted ||= type === "start";
    }
  } finally {
    for (const iterator of iterators) iterator.return();
  }
  if (errors.filter(Boolean).length === streams.length) throw errors[0];
  yield { type: "done", data: { choices, receipts, ...(tokens ? { usage: { completion_tokens: tokens } } : {}) } };
}

async function next(iterator, index) {
  try {
    return { index, ...(await iterator.next()) };
  } catch (error) {
    return { index, error };
  }
}
