"""Presets of the page: applied, saved, renamed, deleted, and compared side by side."""

import socket

import httpx
import pytest

from tests.support.model.tiny_models import tiny_weights
from tests.support.page.browser import (
    BROWSER,
    PROMPT,
    fake_completions,
    json_body,
    new_context,
    run_events,
    set_fields,
    setting,
    sse_stream,
    text,
    wait_for,
)

pytestmark = pytest.mark.slow


def preset(page, name):
    return page.locator("#presets").get_by_role("button", name=name, exact=True)


def pressed(page):
    return [one.inner_text() for one in page.locator('#presets [aria-pressed="true"]').all()]


def values(page, *names):
    return [setting(page, name).input_value() for name in names]


def compare(page, count):
    page.get_by_role("button", name="Compare \u2026").press("Enter")
    page.get_by_role("button", name=f"Compare {count}").press("Enter")


def test_a_preset_applies_its_settings_and_can_be_saved_renamed_and_deleted_by_keyboard(page):
    assert pressed(page) == ["Balanced"]
    set_fields(page, top_k="40")
    assert pressed(page) == [] and "Settings of your own." in page.locator("#presets").inner_text()
    preset(page, "Adventurous").press("Enter")
    assert values(page, "temperature", "top_p", "top_k", "min_p") == ["1.2", "1", "", "0.05"]
    assert "Temperature 1.2, top p 1, min p 0.05; otherwise" in page.locator("#presets").inner_text()
    assert page.evaluate("() => document.activeElement.textContent") == "Adventurous", "the button keeps the focus"
    set_fields(page, top_k="40", max_tokens="20", seed="5")
    preset(page, "Save as a preset").press("Enter")
    page.keyboard.type("precise")
    page.keyboard.press("Enter")
    page.get_by_text("There is a preset called precise already.").wait_for()
    page.keyboard.press("Control+a")
    page.keyboard.type("Night")
    page.keyboard.press("Enter")
    assert pressed(page) == ["Night"]
    preset(page, "Precise").click()
    page.reload()
    setting(page, "min_p").wait_for(state="attached")
    assert pressed(page) == ["Precise"]
    preset(page, "Night").press("Enter")
    assert values(page, "temperature", "top_k", "max_tokens", "seed") == ["1.2", "40", "20", "5"]
    preset(page, "Rename").press("Enter")
    page.keyboard.type("Not this")
    page.keyboard.press("Escape")
    preset(page, "Rename").press("Enter")
    page.keyboard.type("Moon")
    page.keyboard.press("Enter")
    assert pressed(page) == ["Moon"]
    preset(page, "Delete").press("Enter")
    assert preset(page, "Moon").count() == 0
    page.keyboard.press("Enter")  # Undo has the focus
    assert pressed(page) == ["Moon"]
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no') } })")
    page.reload()
    set_fields(page, top_k="7")
    preset(page, "Save as a preset").click()
    page.keyboard.type("For now")
    page.keyboard.press("Enter")
    page.get_by_text("does not store it beyond this visit").wait_for()
    assert pressed(page) == ["For now"]


def test_columns_compare_presets_with_one_seed_and_each_keeps_its_settings(page):
    sent = []

    def respond(route):
        body = json_body(route.request)
        sent.append(body)
        if body.get("temperature") == 1.2:
            return route.fulfill(status=400, json={"error": {"message": "Too hot."}})
        words = " cold" if body.get("temperature") == 0.3 else " mild"
        seed = body.get("seed", 1)
        *events, (name, done) = run_events(words, seed=seed)
        receipt = {"weights_version": "w", "seed": str(seed), "settings": {}}
        events.append((name, {**done, "receipt": receipt}))
        return route.fulfill(content_type="text/event-stream", body=sse_stream(*events))

    page.route("**/complete", respond)
    page.get_by_role("button", name="Compare", exact=False).press("Enter")
    dialog = page.get_by_role("dialog", name="Compare settings")
    assert [box.is_checked() for box in dialog.get_by_role("checkbox").all()] == [True, True, False]
    dialog.get_by_label("Precise").press("Space")
    assert dialog.get_by_role("button", name="Choose two").get_attribute("aria-disabled") == "true"
    for name in ("Precise", "Adventurous"):
        dialog.get_by_label(name).press("Space")
    dialog.get_by_role("button", name="Compare 3").press("Enter")
    wait_for(page, "done")
    assert [one.inner_text() for one in page.locator(".abreast-name").all()] == ["Balanced", "Precise", "Adventurous"]
    assert "failed: Too hot." in page.locator("#columns").inner_text()
    assert [body.get("temperature") for body in sent] == [None, 0.3, 1.2]
    assert len({body["seed"] for body in sent}) == 1 and not any("n" in body for body in sent)
    page.keyboard.press("2")
    assert text(page) == f"{PROMPT} cold"
    assert page.locator("#branches").get_by_role("treeitem", name="Run 2, Precise").count() == 1
    page.locator("#run > summary").click()
    assert str(sent[0]["seed"]) in page.locator("#receipt").inner_text()
    page.locator("#generate").click()
    wait_for(page, "done")
    assert "temperature" not in sent[-1], "taking a column does not change the settings"


def test_a_comparison_inserts_at_the_caret_and_rewrites_a_selection(page):
    sent = fake_completions(page, *run_events(" red"))
    page.locator("#document").fill("The door was old. She waited.")
    page.locator("#at-caret").check()
    page.locator("#document").evaluate("(area) => area.setSelectionRange(12, 12)")
    compare(page, 2)
    wait_for(page, "done")
    assert [body["prompt"] for body in sent] == ["The door was"] * 2
    page.keyboard.press("2")
    assert text(page) == "The door was red old. She waited."
    page.locator("#document").evaluate("(area) => area.setSelectionRange(21, 33)")
    compare(page, 2)
    page.get_by_role("group", name="2 alternatives").wait_for()
    wait_for(page, "done")
    assert sent[-1]["prompt"] == "The door was red old." and "n" not in sent[-1]
    page.keyboard.press("1")
    assert text(page) == "The door was red old. red"


def test_a_column_can_use_the_model_of_another_service(browser, serve, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        origin = f"http://127.0.0.1:{free.getsockname()[1]}"
    own = serve("--compare-origin", origin, fake_ms=1)
    context = new_context(browser, own)
    page = context.new_page()
    sent = []
    page.on("request", lambda request: sent.append(request) if request.url.endswith("/complete") else None)
    page.goto("/")
    setting(page, "min_p").wait_for(state="attached")
    page.get_by_role("button", name="Compare \u2026").press("Enter")
    dialog = page.get_by_role("dialog", name="Compare settings")
    dialog.get_by_text(f"{origin} cannot be reached. Is it running, with --allow-origin {own.url}?").wait_for()
    assert dialog.get_by_role("checkbox").last.is_disabled()
    page.keyboard.press("Escape")
    tuned = tiny_weights(tmp_path / "tuned", mlp_width=96)
    other = serve("--allow-origin", own.url, "--port", origin.rpartition(":")[2], weights=tuned, fake_ms=1)
    page.get_by_role("button", name="Compare \u2026").press("Enter")
    dialog.locator("input:not(:disabled)").nth(3).check()
    dialog.get_by_label("Precise").uncheck()
    dialog.get_by_role("button", name="Compare 2").press("Enter")
    wait_for(page, "done")
    models = [httpx.get(f"{one.url}/v1/models").json()["data"][0] for one in (own, other)]
    assert models[0]["weights_version"] != models[1]["weights_version"]
    names = page.locator(".abreast-name").all_inner_texts()
    assert names == [f"{models[0]['id']}: Balanced", f"{models[1]['id']} ({origin.removeprefix('http://')})"]
    assert all(len(words) > 1 for words in page.locator(".abreast-text").all_inner_texts())
    assert [request.url for request in sent] == [f"{own.url}/complete", f"{origin}/complete"]
    bodies = [body for request in sent if (body := json_body(request))]  # Firefox exposes only the page's own service's
    assert len(bodies) == (1 if BROWSER == "firefox" else 2) and len({body["seed"] for body in bodies}) == 1
    page.keyboard.press("2")
    page.locator("#run > summary").click()
    page.locator("#receipt", has_text=models[1]["weights_version"][:8]).wait_for()
    context.close()
