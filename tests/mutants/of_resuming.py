"""Mutants of answers that clients resume, and of front ends that are processes of their own."""

from mutant import Mutant

RESUME = ("tests/control_plane/frontend/test_resume.py",)
REMOTE = ("tests/control_plane/frontend/test_remote.py",)

OF_RESUMING = [
    Mutant(
        name="resumed-attempt",
        why="the attempt of a resume is ignored: tokens of an earlier one are taken",
        path="control_plane/frontend/client_stream.py",
        text="self.attempt = choice.attempt",
        fault="self.attempt = 0",
        tests=RESUME,
    ),
    Mutant(
        name="resumed-seed",
        why="a resumed choice goes on with the seed of the first choice",
        path="control_plane/frontend/open_requests.py",
        text="yield Choice(valid.params[index],",
        fault="yield Choice(valid.params[0],",
        tests=(*RESUME, "-k", "choices_that_have_not_ended"),
    ),
    Mutant(
        name="resumed-penalties",
        why="what the client has counts as prompt for the penalties, and so twice",
        path="control_plane/frontend/streams.py",
        text="penalized_ids = penalized_prompt_ids(stream.prompt_ids, stream.params)",
        fault="penalized_ids = penalized_prompt_ids(known_ids, stream.params)",
        tests=(*RESUME, "-k", "has_all"),
    ),
    Mutant(
        name="resumed-text",
        why="a stop string is not found if the client has its first characters",
        path="control_plane/frontend/open_requests.py",
        text="if any(map(text.feed, output_ids)):",
        fault="if False:",
        tests=(*RESUME, "-k", "across_the_cut"),
    ),
    Mutant(
        name="unattended-for-ever",
        why="requests of a lost front end are never ended",
        path="control_plane/frontend/remote/port.py",
        text="self._loop.call_later(attended_s, self._release, requests)",
        fault="pass",
        tests=(*REMOTE, "-k", "run_on_for_a_while"),
    ),
    Mutant(
        name="owed-answers",
        why="the next term waits for the answer of a front end that is gone",
        path="control_plane/frontend/remote/port.py",
        text="for _ in range(num_owed):",
        fault="for _ in range(0):",
        tests=(*REMOTE, "-k", "owes_no_answer"),
    ),
    Mutant(
        name="numbers-again",
        why="a front end that is started again gives out numbers that were used",
        path="control_plane/frontend/remote/port.py",
        text="first_id = self._attendance.first_ids[front_end.index]",
        fault="first_id = 1 + front_end.index",
        tests=(*REMOTE, "-k", "run_on_for_a_while"),
    ),
    Mutant(
        name="exits-of-another",
        why="a controller takes the exit of a process that it never knew for that of another",
        path="nanocp/serve/launcher_pipe.py",
        text="process.known_as = 0",
        fault="pass",
        tests=("tests/nanocp/serve/test_supervisor.py", "-k", "outlive"),
    ),
    Mutant(
        name="term-of-the-dead",
        why="a member that has another controller goes on with the term of the lost one",
        path="data_plane/transport/exchange.py",
        text="self._last_ended = self.number",
        fault="self._last_ended = 0",
        tests=("tests/data_plane/member/test_controller_link.py", "-k", "later_one_may"),
    ),
    Mutant(
        name="own-request-ended",
        why="a front end that is back has its own requests ended as if a client had left them",
        path="control_plane/frontend/remote/attendance.py",
        text="if self._attend_again(request_id, client_id):",
        fault="if False:",
        tests=(*REMOTE, "-k", "every_open_request_again"),
    ),
    Mutant(
        name="doubled-token",
        why="a client asks for a token again that it has",
        path="nanocp/client/resumption.py",
        text="self._output_ids[response.index].extend(response.token_ids)",
        fault="self._output_ids[response.index].extend(response.token_ids[:-1])",
        tests=("tests/nanocp/client/test_resumption.py", "-k", "no_gap"),
    ),
]
