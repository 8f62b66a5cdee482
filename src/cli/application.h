// The application around the commands: help, environment variables for flags, errors in one line on stderr, exit codes.
#pragma once

namespace cachalot {

int run_application(int argc, char** argv);

}  // namespace cachalot
