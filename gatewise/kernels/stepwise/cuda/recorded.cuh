// The arguments of captured launches. They never change: they are the address of a struct in device memory (the table), and
// a number of steps. Each call writes its own arguments to the table before the replay.
#pragma once

template <class Arguments>
struct Recorded {
    Arguments* table;
    int step;  // the steps after the step in the table
};

template <class Arguments>
struct Entered {
    Arguments* table;
    Arguments arguments;
};
