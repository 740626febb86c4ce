"""The slowest test files, which start first, so that all cores are busy until the end.

Measured with `--durations=70` on 2026-11-28; the order need not be exact. All others follow in order of their names.
"""

LONGEST = (
    "engine/gpu/test_kernel_compilation.py",
    "engine/cpu/test_arm.py",
    "promises/test_r30_bounded_answers.py",
    "promises/test_r24_clock_jumps.py",
    "promises/test_r17_hostile_files.py",
    "page/test_page_states.py",
    "engine/gpu/test_runner.py",
    "engine/execution/test_parity.py",
    "promises/test_r23_same_text.py",
    "promises/test_r20_soak.py",
    "promises/test_r08_live_loop.py",
    "repository/test_wheel.py",
    "promises/test_r22_nginx.py",
    "promises/test_s27_tokenizer_regexes.py",
    "engine/guided/test_guided_decoding.py",
    "model/train/test_presets.py",
    "promises/test_r18_disk_full.py",
    "repository/test_docs.py",
    "benchmarks/test_gpu.py",
    "engine/sampling/test_sampler_oracle.py",
    "promises/test_r04_leaving_clients.py",
    "benchmarks/test_commands.py",
    "engine/cpu/test_sampler.py",
)
