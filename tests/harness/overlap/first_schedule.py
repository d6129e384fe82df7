"""A schedule for tests: the first that is clearly better than the sequence."""

from nanocp.overlap.search import search


class _Found(Exception):
    pass


def first_schedule(forms, interference, least_gain=1.05, step=1 / 64):
    """The result of a search that ends with the first schedule of that gain."""

    def end(found):
        if found.gain >= least_gain:
            raise _Found(found)

    try:
        search(forms, step, interference, limit_s=600, report=end)
    except _Found as reached:
        return reached.args[0]
    raise AssertionError(f"nothing is {least_gain} times faster than the sequence")
