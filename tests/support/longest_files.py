"""The test files that take longest: they start first, so that no core waits for the other one at the end.

By `--durations=0`; the order need not be exact. All others follow in the order of their names.
"""

LONGEST = (
    "promises/test_r30_bounded_answers.py",
    "promises/test_r10_crashes.py",
    "serving/test_process_lifecycle.py",
    "promises/test_r19_new_weights.py",
    "api/test_resumed_streams.py",
    "model/train/test_presets.py",
    "engine/sampling/test_sampler_oracle.py",
    "page/test_page.py",
    "promises/test_r28_refused_weights.py",
    "promises/test_s27_tokenizer_regexes.py",
    "promises/test_r29_served_version.py",
    "engine/execution/test_parity_switches.py",
    "promises/test_s26_shared_resources.py",
    "promises/test_s26_grammar_masks.py",
    "promises/test_r02_no_collapse.py",
    "promises/test_r11_drain.py",
    "promises/test_r09_health.py",
    "promises/test_r16_stream_contract.py",
    "promises/test_r12_kill_everything.py",
    "engine_client/test_two_engines.py",
    "promises/test_r20_soak.py",
    "promises/test_r22_nginx.py",
    "promises/test_r01_bounded_queue.py",
)
