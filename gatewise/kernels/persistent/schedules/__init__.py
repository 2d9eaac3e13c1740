"""The schedules of launches and matrix products that compute a layer: `schedule.py` states what each of them offers."""
