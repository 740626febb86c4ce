"""The settings panel in a real browser: built from the server's schema, sent as typed, with errors shown."""

from tests.support.page.browser import (
    DONE,
    PROMPT,
    allow_module_imports,
    click_generate,
    complete_prompt,
    fake_completion,
    generate,
    json_body,
    set_fields,
    setting,
    status,
    text,
    used_seed,
    wait_for,
    wait_for_schema,
)

LEFT_OUT = {
    *("prompt", "source", "stream", "echo", "user", "request_id", "logprobs", "truncate_prompt_tokens"),
    *("return_token_ids", "resume"),
}
START = ("start", {"seed": 7, "model": "tiny", "weights_version": "w", "settings": {"temperature": 0.9}})


def unfold(page):
    page.locator("#panel summary").click()


def sent_body(page):
    """The body that the page sends now; this response and all later ones are faked.

    A browser that stops intercepting requests and resumes at once may miss one in between.
    """
    fake_completion(page, START, DONE)
    with page.expect_request("**/complete") as request:
        click_generate(page)
    wait_for(page, "done")
    return json_body(request.value)


# Fields


def test_every_parameter_of_the_schema_has_a_field_with_its_description_and_default(page, server):
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
    settings = complete_prompt(server, max_tokens=0)["receipt"]["settings"] | {"max_tokens": 128}
    numbers = {name: value for name, value in settings.items() if type(value) in (int, float) and name != "n"}
    assert len(numbers) == 10
    shown = {name: setting(page, name).get_attribute("placeholder") for name in numbers}
    assert {name: float(value) for name, value in shown.items()} == numbers


def test_a_field_unknown_to_the_page_is_shown_by_its_type_and_sent(page):
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
    assert sent_body(page)["sparkle_level"] == 3
    page.unroute("**/openapi.json")


def test_the_page_works_before_the_schema_arrives_and_keeps_what_was_typed(page):
    routes = []
    page.route("**/openapi.json", lambda route: routes.append(route))
    page.reload()
    page.locator("#temperature").press_sequentially("0.7")
    page.locator("#model:not(:empty)").wait_for()
    assert page.locator("#panel .field").count() == 6
    assert sent_body(page) == {"prompt": PROMPT, "stream": True, "logprobs": 0, "temperature": 0.7, "max_tokens": 128}
    page.locator("#temperature").focus()
    page.keyboard.press("Home")
    routes[0].continue_()
    wait_for_schema(page)
    page.keyboard.type("1")  # the field still has the focus and the caret
    assert page.locator("#temperature").input_value() == "10.7"
    page.unroute("**/openapi.json")


# Slider, range and reset


def test_slider_and_field_stay_in_sync_and_the_field_is_sent(page):
    field, slider = page.locator("#temperature"), page.get_by_label("Slide: Temperature")
    assert (field.input_value(), slider.input_value()) == ("", "1"), "an empty field: the slider shows the default"
    slider.press("ArrowRight")
    assert field.input_value() == slider.input_value() == "1.05"
    field.fill("0.3")
    assert slider.input_value() == "0.3"
    field.fill("7")
    assert slider.input_value() == "2", "the maximum of the slider"
    assert sent_body(page)["temperature"] == 7
    field.fill("")
    assert slider.input_value() == "1"
    assert slider.get_attribute("aria-valuetext") == "1, the default"
    assert "temperature" not in sent_body(page)


def test_out_of_range_values_are_marked_at_once_and_still_sent(page):
    field = page.locator("#top-p")
    for wrong in ("1.5", "much", "-1"):
        field.fill(wrong)
        assert field.get_attribute("aria-invalid") == "true"
        assert page.locator("#top-p-wrong").inner_text() == "Allowed: a number from 0 to 1."
    with page.expect_request("**/complete") as request:
        generate(page, ends="error")
    assert json_body(request.value)["top_p"] == -1
    assert "top_p" in status(page)
    field.fill("0.5")
    assert field.get_attribute("aria-invalid") == "false"
    assert page.locator("#top-p-wrong").inner_text() == ""


def test_changed_settings_are_counted_and_can_be_reset_singly_or_together(page):
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
    assert sent_body(page) == {"prompt": PROMPT, "stream": True, "logprobs": 0, "max_tokens": 128}


# Kinds of fields


def test_the_server_accepts_each_kind_of_field_and_settings_survive_a_reload(page):
    unfold(page)
    set_fields(page, stop="zz", stop_token_ids="4", logit_bias='{"50": -100}', max_tokens=2, min_p="0.1", n=2)
    setting(page, "ignore_eos").select_option("on")
    with page.expect_response("**/complete") as response:
        click_generate(page)
    assert response.value.ok
    sent = {"stop": ["zz"], "stop_token_ids": [4], "logit_bias": {"50": -100}, "ignore_eos": True}
    assert sent.items() <= json_body(response.value.request).items()
    page.locator('#status[data-state="done"]').wait_for()
    page.reload()
    wait_for_schema(page)
    unfold(page)
    kept = {"stop": "zz", "stop_token_ids": "4", "logit_bias": '{"50": -100}', "min_p": "0.1", "ignore_eos": "true"}
    assert {name: setting(page, name).input_value() for name in kept} == kept
    assert page.locator("#n :checked").input_value() == "2"


def test_the_number_of_continuations_can_be_chosen_by_keyboard(page):
    allow_module_imports(page)
    assert "n" not in sent_body(page)
    page.locator("#n :checked").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    fake_completion(page, START, DONE)
    with page.expect_request("**/complete") as request:
        page.keyboard.press("Control+Enter")
    assert json_body(request.value)["n"] == 3
    assert page.locator("#n input").count() == 4
    page.evaluate("""async () => {
        const { encode } = await import("/web/request/share-link.js");
        location.hash = await encode({ text: "Once", typed: { n: "12" } });
    }""")
    page.locator("#n").get_by_text("12").wait_for()
    assert page.locator("#n :checked").input_value() == "12", "the value of a link is shown and sent"
    page.get_by_role("button", name="Reset all").click()
    assert page.locator("#n input").count() == 4


# The seed


def test_a_random_seed_is_shown_and_can_be_locked(page):
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
    assert "seed" not in sent_body(page)


def test_after_a_reload_or_undo_the_lock_uses_the_seed_of_the_current_text(page):
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
