"""An observer of front ends whose requests nobody counts."""


class Unobserved:
    """An observer that does nothing."""

    def on_request(self, *_: object) -> None:
        pass

    on_submitted = on_first_token = on_token = on_finished = on_request_over = on_request
    http_responded = on_request
