// Stored preferences: only known choices other than the defaults.

import assert from "node:assert/strict";
import { test } from "node:test";
import { valid } from "../../app/web/preferences.js";

test("only known choices other than the defaults are kept", () => {
  assert.deepEqual(valid({ theme: "dark", font: "book", lines: "broad", other: 1, spelling: "on" }), {
    theme: "dark",
    spelling: "on",
  });
  for (const nothing of [null, undefined, [], "text", 7]) assert.deepEqual(valid(nothing), {});
});
