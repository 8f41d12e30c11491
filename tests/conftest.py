"""What holds for every test: hypothesis draws the same examples each time, on a machine of any speed."""

from hypothesis import HealthCheck, settings

# A commit that passed passes again, however slow or busy the machine. No database: what failed once is drawn again.
settings.register_profile(
    "same_examples",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# `pytest --hypothesis-profile=new_examples` looks for cases that nobody has seen.
settings.register_profile("new_examples", settings.get_profile("same_examples"), derandomize=False)
settings.load_profile("same_examples")
