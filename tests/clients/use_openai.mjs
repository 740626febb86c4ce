// The npm package openai: plain, stream, errors, retries. Arguments: the service.
import assert from "node:assert/strict";
import OpenAI, { BadRequestError, NotFoundError } from "openai";

const baseURL = `${process.argv[2]}/v1`;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const prompt = "Once upon a time";
const request = { model, prompt, max_tokens: 12, seed: 7 };

const checks = {
  "the model is found": async () => {
    assert.equal((await client.models.retrieve(model)).id, model);
    await assert.rejects(client.models.retrieve("nowhere"), NotFoundError);
  },
  "a plain completion": async () => {
    const answer = await client.completions.create(request);
    assert.equal(answer.object, "text_completion");
    assert.ok(answer.choices[0].text);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },
  "stream pieces add up to the completion": async () => {
    const pieces = [];
    for await (const chunk of await client.completions.create({ ...request, stream: true })) {
      pieces.push(chunk.choices[0].text);
    }
    assert.ok(pieces.length > 3);
    assert.equal(pieces.join(""), (await client.completions.create(request)).choices[0].text);
  },
  "the last chunk has the usage": async () => {
    let last;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.completions.create({ ...request, ...options })) last = chunk;
    assert.deepEqual(last.choices, []);
    assert.ok(last.usage.completion_tokens <= 12);
  },
  "choices, echo and log-probabilities": async () => {
    const prompts = [prompt, "The moon"];
    const answer = await client.completions.create({ ...request, prompt: prompts, n: 2, echo: true, logprobs: 2 });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
    for (const choice of answer.choices) {
      assert.ok(choice.text.startsWith(prompts[Math.floor(choice.index / 2)]));
      assert.equal(choice.logprobs.tokens.join(""), choice.text);
      assert.equal(choice.logprobs.token_logprobs[0], null);
    }
  },
  "a stream may be closed early": async () => {
    const stream = await client.completions.create({ ...request, max_tokens: 200, stream: true });
    for await (const _ of stream) break;
    assert.ok((await client.completions.create({ ...request, max_tokens: 1 })).choices.length);
  },
  "invalid values are a BadRequestError": async () => {
    await assert.rejects(client.completions.create({ ...request, temperature: -1 }), (error) => {
      assert.ok(error instanceof BadRequestError);
      assert.equal(error.param, "temperature");
      assert.equal(error.requestID, error.error.request_id);
      return true;
    });
    await assert.rejects(client.completions.create({ ...request, model: "nowhere" }), NotFoundError);
  },
  "the raw response names the request": async () => {
    const { data, request_id: id } = await client.completions.create(request).withResponse();
    assert.ok(id);
    assert.equal(data._request_id, id);
  },
};

let failed = 0;
for (const [title, check] of Object.entries(checks)) {
  const started = performance.now();
  try {
    await check();
    console.log(`ok   ${title} (${((performance.now() - started) / 1000).toFixed(2)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL ${title}\n${error.stack}`);
  }
}
process.exit(failed > 0 ? 1 : 0);
