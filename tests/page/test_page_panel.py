"""The settings in a real browser: built from the server's schema, sent as typed, with errors shown."""

import pytest

from tests.support.page.browser import (
    DONE,
    PROMPT,
    allow_modules,
    body_of,
    complete,
    described,
    generate,
    play,
    set_fields,
    setting,
    start,
    status,
    text,
    used_seed,
    wait_for,
)

LEFT_OUT = {"prompt", "stream", "echo", "user", "request_id", "logprobs", "truncate_prompt_tokens", "source"}
START = ("start", {"seed": 7, "model": "tiny", "weights_version": "w", "settings": {"temperature": 0.9}})


@pytest.fixture(autouse=True)
def _described(page):
    """Each test begins when the server has described itself."""
    described(page)


def unfold(page):
    page.locator("#panel summary").click()


def sent(page):
    """What the page asks for now; the answer is played, and so are all later ones.

    A browser that stops intercepting requests and starts again at once may lose one in between.
    """
    play(page, START, DONE)
    with page.expect_request("**/complete") as request:
        start(page)
    wait_for(page, "done")
    return body_of(request.value)


# What is there


def test_every_parameter_of_the_schema_is_there_with_its_name_its_words_and_the_default_that_holds(page, server):
    unfold(page)
    schema = page.request.get("/openapi.json").json()["components"]["schemas"]["CompleteRequest"]["properties"]
    wanted = set(schema) - LEFT_OUT
    for name in wanted:
        control = setting(page, name)
        assert control.is_visible(), name
        described = control.evaluate("""(e) => e.getAttribute("aria-describedby").split(" ")
            .map((id) => document.getElementById(id).textContent).join(" ")""")
        assert schema[name]["description"] in described
        named = control.evaluate("(e) => e.labels?.[0]?.textContent ?? e.getAttribute('aria-label')")
        assert named.lower() == ("continuations" if name == "n" else name.replace("_", " "))
    assert page.locator("#panel .field").count() == len(wanted)
    main = page.locator(".main-settings .field .caption").all_inner_texts()
    assert main == ["Temperature", "Top p", "Top k", "Max tokens", "Seed", "Continuations"]
    settings = complete(server, max_tokens=0)["receipt"]["settings"] | {"max_tokens": 128}
    numbers = {name: value for name, value in settings.items() if type(value) in (int, float) and name != "n"}
    assert len(numbers) == 10
    shown = {name: setting(page, name).get_attribute("placeholder") for name in numbers}
    assert {name: float(value) for name, value in shown.items()} == numbers


def test_a_field_that_the_page_has_never_heard_of_appears_by_its_type_and_is_sent(page):
    document = page.request.get("/openapi.json").json()
    new = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}], "description": "New here."}
    document["components"]["schemas"]["CompleteRequest"]["properties"]["sparkle_level"] = new
    page.route("**/openapi.json", lambda route: route.fulfill(json=document))
    page.reload()
    unfold(page)
    field = page.locator(".more-settings .field", has=page.locator("#setting-sparkle-level"))
    assert "New here. A whole number from 1 to 9." in field.inner_text()
    page.get_by_label("Sparkle level", exact=True).fill("3")
    assert field.locator(".slider").input_value() == "3"
    assert sent(page)["sparkle_level"] == 3
    page.unroute("**/openapi.json")


def test_one_can_write_before_the_server_has_described_itself_and_nothing_typed_is_lost(page):
    routes = []
    page.route("**/openapi.json", lambda route: routes.append(route))
    page.reload()
    page.locator("#temperature").press_sequentially("0.7")
    page.locator("#model:not(:empty)").wait_for()
    assert page.locator("#panel .field").count() == 6
    assert sent(page) == {"prompt": PROMPT, "stream": True, "logprobs": 0, "temperature": 0.7, "max_tokens": 128}
    page.locator("#temperature").focus()
    page.keyboard.press("Home")
    routes[0].continue_()
    described(page)
    page.keyboard.type("1")  # the hand has not left the keys
    assert page.locator("#temperature").input_value() == "10.7"
    page.unroute("**/openapi.json")


# In step


def test_slider_and_field_are_in_step_and_the_field_holds_the_truth(page):
    field, slider = page.locator("#temperature"), page.get_by_label("Slide: Temperature")
    assert (field.input_value(), slider.input_value()) == ("", "1"), "nothing typed: the slider shows the default"
    slider.press("ArrowRight")
    assert field.input_value() == slider.input_value() == "1.05"
    field.fill("0.3")
    assert slider.input_value() == "0.3"
    field.fill("7")
    assert slider.input_value() == "2", "its end"
    assert sent(page)["temperature"] == 7
    field.fill("")
    assert slider.input_value() == "1"
    assert slider.get_attribute("aria-valuetext") == "1, the default"
    assert "temperature" not in sent(page)


def test_what_is_out_of_range_is_marked_at_once_and_the_server_judges(page):
    field = page.locator("#top-p")
    for wrong in ("1.5", "much", "-1"):
        field.fill(wrong)
        assert field.get_attribute("aria-invalid") == "true"
        assert page.locator("#top-p-wrong").inner_text() == "Allowed: a number from 0 to 1."
    with page.expect_request("**/complete") as request:
        generate(page, ends="error")
    assert body_of(request.value)["top_p"] == -1
    assert "top_p" in status(page)
    field.fill("0.5")
    assert field.get_attribute("aria-invalid") == "false"
    assert page.locator("#top-p-wrong").inner_text() == ""


def test_one_setting_or_all_go_back_and_the_changed_are_counted(page):
    unfold(page)
    count = page.locator("#panel .count")
    reset_all = page.get_by_role("button", name="Reset all")
    assert count.inner_text() == "" and reset_all.count() == 0
    set_fields(page, temperature="0.5", max_tokens="9", min_p="0.1", n=2)
    assert count.inner_text() == "4 changed"
    assert "(1 changed)" in page.locator("#panel summary").inner_text().lower()
    page.get_by_role("button", name="Reset Max tokens").click()
    assert page.locator("#max-tokens").input_value() == "128"
    assert page.evaluate("document.activeElement.id") == "max-tokens"
    assert page.get_by_role("button", name="Reset Max tokens").count() == 0
    reset_all.click()
    assert count.inner_text() == ""
    assert sent(page) == {"prompt": PROMPT, "stream": True, "logprobs": 0, "max_tokens": 128}


# By kind


def test_the_server_takes_each_kind_and_settings_that_are_folded_away_survive_a_reload(page):
    unfold(page)
    set_fields(page, stop="zz", stop_token_ids="4", logit_bias='{"50": -100}', max_tokens=2, min_p="0.1", n=2)
    setting(page, "ignore_eos").select_option("on")
    with page.expect_response("**/complete") as answer:
        start(page)
    assert answer.value.ok
    sent = {"stop": ["zz"], "stop_token_ids": [4], "logit_bias": {"50": -100}, "ignore_eos": True}
    assert sent.items() <= body_of(answer.value.request).items()
    page.locator('#status[data-state="done"]').wait_for()
    page.reload()
    described(page)
    unfold(page)
    kept = {"stop": "zz", "stop_token_ids": "4", "logit_bias": '{"50": -100}', "min_p": "0.1", "ignore_eos": "true"}
    assert {name: setting(page, name).input_value() for name in kept} == kept
    assert page.locator("#n :checked").input_value() == "2"


def test_continuations_are_chosen_by_keyboard(page):
    allow_modules(page)
    assert "n" not in sent(page)
    page.locator("#n :checked").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    play(page, START, DONE)
    with page.expect_request("**/complete") as request:
        page.keyboard.press("Control+Enter")
    assert body_of(request.value)["n"] == 3
    assert page.locator("#n input").count() == 4
    page.evaluate("""async () => {
        const { encode } = await import("/web/request/share.js");
        location.hash = await encode({ text: "Once", typed: { n: "12" } });
    }""")
    page.locator("#n").get_by_text("12").wait_for()
    assert page.locator("#n :checked").input_value() == "12", "what a link asks for is shown, and sent"
    page.get_by_role("button", name="Reset all").click()
    assert page.locator("#n input").count() == 4


# The seed


def test_an_unlocked_seed_is_told_and_the_lock_keeps_it(page):
    lock, field = page.get_by_role("button", name="Lock the seed"), page.locator("#seed")
    set_fields(page, max_tokens=8)
    generate(page)
    first, used = text(page), used_seed(page)
    assert field.get_attribute("placeholder") == f"random, was {used[:6]}\u2026"
    assert (field.input_value(), lock.get_attribute("aria-pressed")) == ("", "false")
    lock.click()
    assert (field.input_value(), lock.get_attribute("aria-pressed")) == (used, "true")
    page.locator("#undo").click()
    generate(page)
    assert text(page) == first
    lock.click()
    assert (field.input_value(), lock.get_attribute("aria-pressed")) == ("", "false")
    assert "seed" not in sent(page)


def test_after_a_reload_or_an_undo_the_lock_keeps_the_seed_of_the_text_that_stands_there(page):
    lock, field = page.get_by_role("button", name="Lock the seed"), page.locator("#seed")
    set_fields(page, max_tokens=4)
    generate(page)
    first = used_seed(page)
    generate(page)
    second = used_seed(page)
    page.locator("#undo").click()
    assert (first != second, field.get_attribute("placeholder")) == (True, f"random, was {first[:6]}\u2026")
    page.locator("#redo").click()
    page.reload()
    page.get_by_placeholder(f"random, was {second[:6]}\u2026").wait_for()
    lock.click()
    assert field.input_value() == second
