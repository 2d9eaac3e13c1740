"""The factors of matrix products over all steps: gathered, padded, or rounded to float16."""
