! Calls whose arguments differ on the last rank: messages CASE. Each rank prints "rank code text".
program messages
    use mpi
    use pmm3d
    implicit none
    integer, parameter :: n = 6
    double precision, target :: shards(n, n, 3) = 1
    integer :: ierr, rank, size, given, provided, grid, context, matrices(3), box(4), code, other(9)
    integer :: desc(9) = [1, 0, n, n, 2, 2, 0, 0, n]
    character(len=20) :: which
    character(len=1), parameter :: layouts(3) = ["A", "B", "C"]
    logical :: last

    call get_command_argument(1, which)
    call MPI_Init_thread(MPI_THREAD_MULTIPLE, provided, ierr)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
    call MPI_Comm_size(MPI_COMM_WORLD, size, ierr)
    last = rank == size - 1
    code = pmm3d_grid(MPI_COMM_WORLD, 1, 1, size, grid)
    do given = 1, 3
        code = code + pmm3d_matrix(grid, "d", n, n, layouts(given), "F", shards(1, 1, given), matrices(given))
    end do
    code = code + pmm3d_context(MPI_COMM_WORLD, 1, 1, "R", context)
    if (code /= 0) call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
    box = [1, 0, 1, 0]
    if (rank == 0) box = [1, n, 1, n]

    select case (which)
    case ("grid")
        code = pmm3d_grid(MPI_COMM_WORLD, 1, merge(2, 1, last), size, given)
    case ("layout")
        code = pmm3d_matrix(grid, "d", n, n, merge("/ ", "A ", last), "F", shards(1, 1, 1), given)
    case ("type")
        code = pmm3d_matrix(grid, merge("?", "d", last), n, n, "A", "F", shards(1, 1, 1), given)
    case ("alpha")
        code = pmm3d_matmul("N", "N", merge(2d0, 1d0, last), matrices(1), matrices(2), 0d0, matrices(3))
    case ("b")
        code = pmm3d_matmul("N", "N", 1d0, matrices(1), matrices(merge(3, 2, last)), 0d0, matrices(3))
    case ("order")
        code = pmm3d_from_blocks(shards(:, :, 1), box, merge("C", "F", last), matrices(1))
    case ("descriptor", "leading", "part")
        other = desc
        if (which == "descriptor" .and. last) other(4) = n + 1
        if (which == "descriptor") other(9) = n + rank
        if (which == "leading" .and. last) other(9) = 0
        code = pmm3d_pgemm(context, "d", "N", "T", 2, n, n, 1d0, shards(:, :, 1), merge(6, 1, which == "part"), 1, &
                           other, shards(:, :, 1), 1, 1, desc, 0d0, shards(:, :, 3), 1, 1, desc)
    case ("calls")
        if (last) then
            code = pmm3d_redistribute(matrices(1), matrices(3))
        else
            code = pmm3d_matmul("N", "N", 1d0, matrices(1), matrices(2), 0d0, matrices(3))
        end if
    case ("late")
        if (last) call execute_command_line("sleep 4")
        code = pmm3d_redistribute(matrices(1), matrices(2))
    end select
    print "(i0, 1x, i0, 1x, a)", rank, code, pmm3d_last_error()
    flush (6)
    code = pmm3d_finalize()
    call MPI_Finalize(ierr)
end program
