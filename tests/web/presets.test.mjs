// presets/presets.js: what a preset sets, what it leaves alone, and which names are valid.

import assert from "node:assert/strict";
import test from "node:test";
import { applied, BUILT_IN, description, isApplied, newName, parsed, PresetError, settingsOf } from "../../app/web/presets/presets.js";

const typed = { temperature: "0.9", top_p: "", min_p: "0.1", max_tokens: "64", stop: "END", seed: "7", n: "3" };

test("a preset resets only the sampling settings that it does not list", () => {
  const precise = BUILT_IN[0];
  const after = applied(precise, typed);
  assert.deepEqual([after.temperature, after.top_p, after.min_p], ["0.3", "0.9", ""]);
  assert.deepEqual([after.max_tokens, after.stop, after.seed, after.n], ["64", "END", "7", "3"]);
  assert.ok(isApplied(precise, after) && !isApplied(precise, typed));
  assert.ok(!isApplied(precise, { ...after, typical_p: "0.5" }), "another sampling setting means another preset");
  assert.ok(isApplied(BUILT_IN[1], { max_tokens: "1" }), "fields that are not on the page yet have their defaults");
});

test("settings are saved without those that belong to one text", () => {
  const saved = { name: "Mine", settings: settingsOf({ ...typed, source: "Bonjour", suffix: "." }) };
  assert.deepEqual(saved.settings, { temperature: "0.9", min_p: "0.1", max_tokens: "64", stop: "END" });
  assert.ok(isApplied(saved, typed));
  assert.deepEqual(parsed(JSON.stringify([saved])), [saved]);
});

test("stored items that are not presets are left out", () => {
  const good = { name: "A", settings: { top_k: "3" } };
  const bad = [null, 1, {}, { name: "B" }, { name: "", settings: {} }, { name: "C", settings: { top_k: 3 } }];
  assert.deepEqual(parsed(JSON.stringify([...bad, good])), [good]);
  for (const json of [null, "", "{", "{}", "7"]) assert.deepEqual(parsed(json), []);
});

test("a description names every field that the preset sets", () => {
  for (const preset of BUILT_IN) {
    const words = description(preset).toLowerCase();
    for (const [name, text] of Object.entries(preset.settings)) assert.ok(words.includes(`${name.replaceAll("_", " ")} ${text}`), words);
  }
  assert.equal(description(BUILT_IN[1]), "Every sampling setting at the model's default.");
  assert.ok(description({ settings: { grammar: "x\n".repeat(99) } }).length < 100);
});

test("a name is new, and neither empty nor long", () => {
  const presets = [{ name: "Mine", settings: {} }];
  assert.equal(newName("  A  b ", presets), "A b");
  for (const name of ["", "  ", "x".repeat(41), "mine", "PRECISE"]) assert.throws(() => newName(name, presets), PresetError, name);
});
