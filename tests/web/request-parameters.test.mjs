// The panel's fields come from the server's schema alone: types, limits, groups and order.

import assert from "node:assert/strict";
import test from "node:test";
import { parameters } from "../../app/web/request/request-parameters.js";

const nullable = (...shapes) => ({ anyOf: [...shapes, { type: "null" }] });
const integer = (limits = {}) => ({ type: "integer", ...limits });

function described(properties, schemas = {}) {
  const schema = { $ref: "#/components/schemas/CompleteRequest" };
  const post = { requestBody: { content: { "application/json": { schema } } } };
  return { paths: { "/complete": { post } }, components: { schemas: { CompleteRequest: { properties }, ...schemas } } };
}

function only(name, schema, schemas) {
  return parameters(described({ [name]: schema }, schemas))[0];
}

test("the main group comes first in its own order, the rest in the server's order", () => {
  const names = ["min_tokens", "max_tokens", "n", "include_stop", "stop", "seed", "regex", "temperature"];
  const found = parameters(described(Object.fromEntries(names.map((name) => [name, { type: "integer" }]))));
  assert.deepEqual(
    found.map(({ name, group }) => `${group} ${name}`),
    [
      ...["main temperature", "main max_tokens", "main seed", "main n"],
      ...["more min_tokens", "more stop", "more include_stop", "more regex"],
    ],
  );
});

test("fields that the page sets itself are left out, and source without an encoder", () => {
  const names = ["prompt", "stream", "echo", "user", "request_id", "logprobs", "truncate_prompt_tokens", "source"];
  const document = described(Object.fromEntries(names.map((name) => [name, { type: "string" }])));
  assert.deepEqual(parameters(document), []);
  assert.deepEqual(parameters(document, { encoder: true }).map(({ name }) => name), ["source"]);
});

test("the kind follows from the type, also through anyOf, lists of types and references", () => {
  const kinds = {
    integer: integer(),
    number: { type: "number" },
    boolean: { type: "boolean" },
    text: { type: "string" },
    texts: { anyOf: [{ type: "string" }, { type: "array", items: { type: "string" } }] },
    integers: { type: "array", items: { type: "integer" } },
    json: { anyOf: [{ type: "object" }, { type: "boolean" }, { type: "string" }] },
  };
  for (const [kind, schema] of Object.entries(kinds)) {
    assert.equal(only("new_field", schema).kind, kind);
    assert.equal(only("new_field", nullable(schema)).kind, kind);
    assert.equal(only("new_field", { $ref: "#/components/schemas/It" }, { It: schema }).kind, kind);
  }
  assert.equal(only("new_field", { type: ["integer", "null"] }).kind, "integer");
  assert.equal(only("source_like", nullable({ type: "string" }, kinds.integers)).kind, "text");
  for (const odd of [{}, { type: "array", items: { type: "object" } }, { anyOf: [kinds.text, kinds.number] }]) {
    assert.equal(only("new_field", odd).kind, "json", JSON.stringify(odd));
  }
});

test("an unknown field is shown under More, with its description and limits", () => {
  const schema = { ...nullable(integer({ minimum: 1, exclusiveMaximum: 9 })), description: "What it does." };
  assert.deepEqual(only("brand_new_json_thing", schema), {
    name: "brand_new_json_thing",
    label: "Brand new JSON thing",
    help: "What it does.",
    kind: "integer",
    group: "more",
    sweep: { min: 1, max: 8, step: 1 },
    minimum: 1,
    below: 9,
  });
});

test("limits include lists' and their items'", () => {
  const item = { type: "string", minLength: 1, maxLength: 256 };
  const stop = only("stop", nullable(item, { type: "array", items: item, maxItems: 16 }));
  assert.deepEqual([stop.minLength, stop.maxLength, stop.maxItems], [1, 256, 16]);
  const ids = only("stop_token_ids", nullable({ type: "array", items: integer({ minimum: 0 }), maxItems: 64 }));
  assert.deepEqual([ids.kind, ids.minimum, ids.maxItems], ["integers", 0, 64]);
  assert.deepEqual(only("level", { type: "string", enum: ["low", "high"] }).choices, ["low", "high"]);
});

test("only fields with a small range have a slider", () => {
  const sweep = (name, limits, type = "number") => only(name, { type, ...limits }).sweep;
  assert.deepEqual(sweep("top_p", { minimum: 0, maximum: 1 }), { min: 0, max: 1, step: 0.01 });
  assert.deepEqual(sweep("typical_p", { exclusiveMinimum: 0, maximum: 1 }), { min: 0, max: 1, step: 0.01 });
  assert.deepEqual(sweep("presence_penalty", { minimum: -2, maximum: 2 }), { min: -2, max: 2, step: 0.01 });
  assert.equal(sweep("temperature", { minimum: 0, maximum: 10 }).max, 2, "limited to the useful range");
  assert.equal(sweep("seed", { minimum: -(2 ** 63), exclusiveMaximum: 2 ** 63 }, "integer"), null);
  assert.equal(sweep("something", { exclusiveMinimum: 0 }), null);
  assert.equal(sweep("min_tokens", { minimum: 0, exclusiveMaximum: 2 ** 31 }, "integer"), null);
});
